// The page: what is chosen, what the scheduler tells, and which view shows it.

import { follow, get, now, post } from "./api.js";
import { forgetHidden } from "./charts.js";
import { h, show } from "./dom.js";
import { eventsTab, jobsTab } from "./jobs.js";
import { nowTab } from "./now.js";
import { curves, drawCurves, hasEnded, problems, summary } from "./progress.js";
import { forget, roundsTab, stopReplay } from "./rounds.js";

const TABS = [
  ["now", "Now"],
  ["curves", "Curves"],
  ["rounds", "Rounds"],
  ["jobs", "Jobs"],
  ["events", "Events"],
];
const SILENT_MS = 5000; // Then the page says what to do.
const element = (id) => document.getElementById(id);

let route = readRoute();
let sections = {};
let history = { job: "", every: 1, next: 0, rounds: [], isLoading: false };
let refusal = "",
  keyRefusal = "",
  silentSince = 0,
  stopFollowing = () => {},
  isDue = false,
  followed = "";

function readRoute() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const clusters = (parts.get("clusters") ?? "").split(",").filter(Boolean).map(Number);
  return {
    tab: TABS.some(([id]) => id === parts.get("tab")) ? parts.get("tab") : "now",
    job: parts.get("job") ?? "",
    round: Number(parts.get("round") ?? 0),
    clusters,
  };
}

// Changes what is chosen. The address has it, so that it can be bookmarked.
function choose(changes) {
  if ("tab" in changes || "job" in changes) stopReplay();
  route = { ...route, ...changes };
  const parts = Object.entries({ ...route, clusters: route.clusters.join(",") }).filter(([, value]) => value);
  window.history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
  listen();
  again();
}

function listen() {
  const query = new URLSearchParams({ job: route.job, clusters: route.clusters.join(",") }).toString();
  if (query === followed) return;
  followed = query;
  stopFollowing();
  stopFollowing = follow(
    query,
    (changed) => {
      sections = { ...sections, ...changed };
      refusal = keyRefusal = "";
      silentSince = 0;
      loadRounds();
      again();
    },
    (state) => {
      element("connection").className = state === true ? "on" : "off";
      element("connection").textContent = state === true ? "live" : !state ? "connection lost, trying again …" : state.status === 403 ? "not connected" : state.message;
      silentSince = state === null ? silentSince || Date.now() : 0;
      if (state instanceof Error && state.status === 403) refusal = state.message;
      again();
    },
  );
}

const chosenJob = () => (sections.jobs ?? []).find((job) => job.id === (sections.job?.id ?? route.job));

// Fetches the records of rounds that are not here yet, and the last one again: its model is evaluated after its commit.
async function loadRounds() {
  const job = chosenJob();
  if (!job || history.isLoading) return;
  if (history.job !== job.id || job.committed <= history.next - history.every) {
    history = { job: job.id, every: 1, next: 0, rounds: [], isLoading: false };
    forget();
  }
  const own = history,
    last = own.rounds.at(-1);
  const isEvaluated = last && !last.metrics && job.evaluation?.round === last.round;
  if (own.next >= job.committed && !isEvaluated) return;
  if (last) own.next = last.round - 1;
  own.isLoading = true;
  try {
    while (own === history && own.next < job.committed) {
      const page = await get(`/api/jobs/${encodeURIComponent(job.id)}/rounds?after=${own.next}`);
      if (page.every !== own.every && own.next > 0) {
        Object.assign(own, { every: page.every, next: 0, rounds: [] });
        continue;
      }
      const rounds = [...own.rounds.filter(({ round }) => round <= own.next), ...page.rounds];
      Object.assign(own, { every: page.every, next: page.next, rounds });
      if (page.done) break;
    }
  } catch (error) {
    console.warn(error);
  }
  own.isLoading = false;
  if (chosenJob() !== job) loadRounds(); // The scheduler has told more meanwhile.
  again();
}

function again() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    render();
  });
}

function render() {
  if (refusal) return renderLocked();
  const job = chosenJob();
  // A testbed may end with its job.
  const isSilent = silentSince > 0 && Date.now() - silentSince > SILENT_MS && !(job && hasEnded(job));
  const silence =
    isSilent &&
    h(
      "p",
      {},
      "The scheduler does not answer. On a testbed, type ",
      h("code", {}, "collapipe up"),
      " in its folder, and open the address that it prints. In a deployment, start the scheduler again.",
    );
  if (!sections.jobs) return show(element("problems"), silence);
  const rounds = history.job === job?.id ? history.rounds : [];
  const view = { job, rounds, sections, route, choose, again, now: now() };
  document.title = job ? `${job.name}: ${job.state} – CollaPipe` : "CollaPipe";
  element("chooser").hidden = !job;
  show(
    element("job"),
    sections.jobs.map((one) =>
      h("option", { value: one.id, selected: one.id === job?.id }, `${one.name}, ${one.state} (${one.id.split("-").at(-1)})`),
    ),
  );
  if (job) element("job").value = job.id;
  show(
    element("problems"),
    silence,
    problems(view).map(({ text, isWarning }) => h("p", { class: isWarning ? "warning" : null }, text)),
  );
  show(
    element("summary"),
    job ? summary(view) : h("p", { class: "card" }, "No job yet. Start one with ", h("code", {}, "collapipe train --preset demo"), "."),
  );
  show(
    element("tabs"),
    TABS.map(([id, name]) =>
      h(
        "button",
        {
          role: "tab",
          id: `tab-${id}`,
          "aria-selected": String(route.tab === id),
          "aria-controls": "content",
          tabindex: route.tab === id ? 0 : -1,
          onclick: () => choose({ tab: id }),
          onkeydown: moveTab,
        },
        name,
      ),
    ),
  );
  element("content").setAttribute("aria-labelledby", `tab-${route.tab}`);
  const views = {
    now: nowTab,
    curves: () => (job ? curves(view) : null),
    rounds: () => (job ? roundsTab(view) : null),
    jobs: jobsTab,
    events: eventsTab,
  };
  element("content").className = route.tab;
  show(element("content"), h("div", { class: "view", "data-key": route.tab }, views[route.tab](view)));
  forgetHidden();
  if (route.tab === "curves" && rounds.length) drawCurves(view);
}

function renderLocked() {
  for (const id of ["summary", "problems", "tabs"]) show(element(id));
  element("chooser").hidden = true;
  show(
    element("content"),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "This page needs its key"),
      h("p", {}, keyRefusal || refusal),
      h(
        "p",
        {},
        "Type ",
        h("code", {}, "collapipe status"),
        " in the folder where the testbed was started, and open the address that it prints. Each address works once.",
      ),
    ),
  );
}

function moveTab(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const at = TABS.findIndex(([id]) => id === route.tab),
    [next] = TABS[(at + step + TABS.length) % TABS.length];
  choose({ tab: next });
  requestAnimationFrame(() => requestAnimationFrame(() => element(`tab-${next}`).focus()));
}

// Exchanges the key in the address, if it has one, for a cookie.
async function useKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return;
  keyRefusal = "";
  window.history.replaceState(null, "", location.pathname);
  await post("/api/session", { key }).catch((error) => (keyRefusal = `${error.message}.`));
  followed = "";
}

async function start() {
  await useKey();
  element("job").onchange = (event) => choose({ job: event.target.value, round: 0 });
  window.addEventListener("hashchange", () => useKey().then(() => choose(readRoute())));
  document.querySelector(".skip").onclick = (event) => {
    event.preventDefault(); // The address has what is chosen.
    element("content").focus();
  };
  setInterval(again, 1000); // Times left go down.
  listen();
}

start();
