// Talks to the scheduler.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let ahead = 0; // Seconds by which the clock of the scheduler is ahead of that of the browser.

// The time of the scheduler, in Unix seconds.
export const now = () => Date.now() / 1000 + ahead;

async function ask(path, options) {
  const answer = await fetch(path, { credentials: "same-origin", ...options });
  const off = Date.parse(answer.headers.get("Date")) / 1000 - Date.now() / 1000;
  ahead = Math.abs(off) > 3 ? off : 0; // The header has whole seconds. NaN counts as 0.
  if (!answer.ok) {
    const { error } = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, error ?? `the scheduler answered ${answer.status}`);
  }
  return answer.status === 204 ? null : answer.json();
}

export const get = (path) => ask(path);
export const post = (path, content = {}) =>
  ask(path, { method: "POST", headers: { "X-CollaPipe": "1", "Content-Type": "application/json" }, body: JSON.stringify(content) });

// Follows the changes of what the scheduler knows, until the result is called. Connects again after an interruption.
export function follow(query, onChange, onConnection) {
  let source = null,
    timer = 0,
    isOver = false;
  const open = async () => {
    try {
      const state = await get(`/api/state?${query}`);
      if (isOver) return;
      onChange(state);
    } catch (error) {
      if (isOver) return;
      onConnection(error instanceof Refused ? error : null);
      if (!(error instanceof Refused && error.status === 403)) later();
      return;
    }
    source = new EventSource(`/api/stream?${query}`);
    source.onopen = () => onConnection(true);
    source.onmessage = (message) => onChange(JSON.parse(message.data));
    source.onerror = () => {
      onConnection(null);
      source.close();
      later();
    };
  };
  const later = () => {
    if (!isOver) timer = setTimeout(open, 2000);
  };
  open();
  return () => {
    isOver = true;
    clearTimeout(timer);
    source?.close();
  };
}
