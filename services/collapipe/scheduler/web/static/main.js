// The page: what is chosen, what the scheduler tells, and which view shows it.

import { follow, get, post } from "./api.js";
import { h, show } from "./dom.js";
import { bytes, clock, day, plural, short } from "./format.js";
import { clusterCard, clusterTile, progressBar } from "./pipeline.js";
import { curves, drawCurves, hasEnded, problems, summary, timeLeft } from "./progress.js";
import { forget, roundsTab } from "./rounds.js";

const TABS = [["now", "Now"], ["curves", "Curves"], ["rounds", "Rounds"], ["jobs", "Jobs"], ["events", "Events"]];
const FILTERS = [["all", "all"], ["problems", "with problems"], ["working", "that work"], ["idle", "without a job"]];
const BAD = ["HOST_LOST", "HOST_LEFT_OUT", "ATTEMPT_FAILED", "WAITING_FOR_HOSTS", "JOB_GIVEN_UP", "UNUSUAL_CHANGE"];
const GOOD = ["HOST_BACK", "RECOVERED"];
const element = (id) => document.getElementById(id);

let route = readRoute();
let sections = {};
let history = { job: "", every: 1, next: 0, rounds: [], isLoading: false };
let refusal = "", stopFollowing = () => {}, isDue = false, filter = "all", followed = "";

function readRoute() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const clusters = (parts.get("clusters") ?? "").split(",").filter(Boolean).map(Number);
  return { tab: TABS.some(([id]) => id === parts.get("tab")) ? parts.get("tab") : "now", job: parts.get("job") ?? "", round: Number(parts.get("round") ?? 0), clusters };
}

// Changes what is chosen. The address has it, so that it can be bookmarked.
function choose(changes) {
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
  stopFollowing = follow(query, (changed) => {
    sections = { ...sections, ...changed };
    refusal = "";
    loadRounds();
    again();
  }, (state) => {
    element("connection").className = state === true ? "on" : "off";
    element("connection").textContent = state === true ? "live" : state ? "not connected" : "connection lost, trying again …";
    if (state instanceof Error && state.status === 403) refusal = state.message;
    again();
  });
}

const chosenJob = () => (sections.jobs ?? []).find((job) => job.id === (sections.job?.id ?? route.job));

// Fetches the records of rounds that are not here yet.
async function loadRounds() {
  const job = chosenJob();
  if (!job || history.isLoading) return;
  if (history.job !== job.id || job.committed < history.next - history.every) {
    history = { job: job.id, every: 1, next: 0, rounds: [], isLoading: false };
    forget();
  }
  const own = history;
  own.isLoading = true;
  try {
    while (own === history && own.next < job.committed) {
      const page = await get(`/api/jobs/${encodeURIComponent(job.id)}/rounds?after=${own.next}`);
      if (page.every !== own.every && own.next > 0) {
        Object.assign(own, { every: page.every, next: 0, rounds: [] });
        continue;
      }
      Object.assign(own, { every: page.every, next: page.next });
      own.rounds.push(...page.rounds);
      if (page.done) break;
    }
  } catch (error) {
    console.warn(error);
  }
  own.isLoading = false;
  const last = own.rounds.at(-1);
  // The evaluation of the last model comes after its round.
  if (last && !last.metrics && job.evaluation?.round === last.round) last.metrics = { [job.evaluation.metric]: job.evaluation.value };
  again();
}

function again() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; render(); });
}

function render() {
  if (refusal) return renderLocked();
  if (!sections.jobs) return;
  const job = chosenJob(), rounds = history.job === job?.id ? history.rounds : [];
  const view = { job, rounds, every: history.every, sections, route, choose, again, now: Date.now() / 1000 };
  document.title = job ? `${job.name}: ${job.state} – CollaPipe` : "CollaPipe";
  element("chooser").hidden = !job;
  show(element("job"), sections.jobs.map((one) => h("option", { value: one.id, selected: one.id === job?.id }, `${one.name}, ${one.state} (${one.id.split("-").at(-1)})`)));
  if (job) element("job").value = job.id;
  show(element("problems"), problems(view).map((text) => h("p", {}, text)));
  show(element("summary"), job ? summary(view) : h("p", { class: "card" }, "No job yet. Start one with ", h("code", {}, "collapipe train --preset demo"), "."));
  show(element("tabs"), TABS.map(([id, name]) => h("button", { role: "tab", id: `tab-${id}`, "aria-selected": String(route.tab === id), "aria-controls": "content", tabindex: route.tab === id ? 0 : -1, onclick: () => choose({ tab: id }), onkeydown: moveTab }, name)));
  element("content").setAttribute("aria-labelledby", `tab-${route.tab}`);
  const views = { now: nowTab, curves: () => job ? curves(view) : null, rounds: () => job ? roundsTab(view) : null, jobs: jobsTab, events: eventsTab };
  element("content").className = route.tab;
  show(element("content"), h("div", { class: "view", "data-key": route.tab }, views[route.tab](view)));
  if (route.tab === "curves" && rounds.length) drawCurves(view);
}

function renderLocked() {
  for (const id of ["summary", "problems", "tabs"]) show(element(id));
  element("chooser").hidden = true;
  show(element("content"), h("section", { class: "card" }, h("h2", {}, "This page needs its link"), h("p", {}, refusal),
    h("p", {}, "Type ", h("code", {}, "collapipe status"), " in the folder where the testbed was started, and open the link that it prints. Each link works once.")));
}

function moveTab(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const at = TABS.findIndex(([id]) => id === route.tab), [next] = TABS[(at + step + TABS.length) % TABS.length];
  choose({ tab: next });
  requestAnimationFrame(() => requestAnimationFrame(() => element(`tab-${next}`).focus()));
}

const toggle = (index) => choose({ clusters: route.clusters.includes(index) ? route.clusters.filter((one) => one !== index) : [...route.clusters, index].slice(-12) });

function nowTab({ job, sections: { clusters, details, counts, edge, jobs }, now }) {
  const names = new Map(jobs.map((one) => [one.id, one.name])), byIndex = new Map(clusters.map((one) => [one.index, one]));
  const isMany = clusters.some((cluster) => !details[cluster.index]);
  const open = Object.keys(details).filter((index) => byIndex.has(Number(index)));
  if (!clusters.length) return h("p", { class: "card" }, "No host has registered yet. This takes up to a minute after the start.");
  const shown = clusters.filter((one) => ({ all: true, problems: one.lost || one.suspected, working: one.working, idle: !one.job })[filter]);
  return [
    h("div", { class: "clusters" }, open.map((index) => clusterCard(byIndex.get(Number(index)), details[index], names.get(byIndex.get(Number(index)).job) ?? byIndex.get(Number(index)).job, now, isMany ? () => toggle(Number(index)) : null))),
    !edge.length && h("p", { class: "waits" }, "There is no edge server."),
    isMany && h("section", { class: "card", "data-key": "tiles", "aria-label": "All clusters" },
      h("header", {}, h("h3", {}, `${plural(counts.clusters, "cluster")} with ${plural(counts.devices, "device")}`), h("label", {}, "Show clusters ", h("select", { onchange: (event) => { filter = event.target.value; again(); } }, FILTERS.map(([id, words]) => h("option", { value: id, selected: filter === id }, words)))),
        h("ul", { class: "legend" }, [["working", "works"], ["idle", "idle"], ["suspected", "left out"], ["lost", "lost"]].map(([state, words]) => h("li", { class: `state ${state}` }, words)))),
      h("p", { class: "quiet" }, "A square is a host. Press a cluster to see its hosts and links."),
      h("div", { class: "tiles" }, shown.map((one) => clusterTile(one, route.clusters.includes(one.index), () => toggle(one.index)))),
      counts.clusters > clusters.length && h("p", { class: "quiet" }, `and ${plural(counts.clusters - clusters.length, "more cluster")}`)),
    h("section", { class: "card", "data-key": "last" }, h("h3", {}, "Last events"), events(5), job && !hasEnded(job) && jobs.some((one) => one.queue_position) && h("p", {}, `${plural(jobs.filter((one) => one.queue_position).length, "job")} in the queue: see Jobs.`)),
  ];
}

function events(most) {
  const listed = (sections.job?.events ?? []).slice(-most).reverse();
  if (!listed.length) return h("p", { class: "quiet" }, "No events since the scheduler started. Its log has earlier ones.");
  return h("ol", { class: "events" }, listed.map((event) => h("li", { class: BAD.includes(event.kind) ? "bad" : GOOD.includes(event.kind) ? "good" : "", "data-key": event.number }, h("time", {}, clock(event.at)), h("span", {}, event.text))));
}

const eventsTab = () => h("section", { class: "card" }, h("h3", {}, "Events of the job since the scheduler started"), events(200));

function jobsTab({ sections: { jobs, counts }, now }) {
  const cells = (job) => [["State", h("span", { class: `state ${job.state}` }, job.state)], ["Rounds", [progressBar(job.committed / job.rounds), `${job.committed} of ${job.rounds}`]], ["Time", timeLeft(job, now)], ["Begun", job.submitted ? day(job.submitted) : "–"],
    ["Result", job.evaluation ? `${job.evaluation.metric} ${short(job.evaluation.value)}` : "–"], ["Size", job.stored_bytes ? bytes(job.stored_bytes) : "–"], ["Owner", job.owner || "everybody"]];
  return h("section", { class: "card" }, h("h3", {}, plural(counts.jobs, "job")), jobs.length > 0 && h("table", { class: "jobs" },
    h("thead", {}, h("tr", {}, ["Job", ...cells(jobs[0]).map(([title]) => title), ""].map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, jobs.map((job) => h("tr", { "data-key": job.id, class: job.id === sections.job?.id ? "chosen" : "" },
      h("th", { scope: "row" }, h("button", { onclick: () => choose({ job: job.id, round: 0, tab: "now" }), "aria-label": `Look at job ${job.id}` }, job.name), h("small", {}, job.id)),
      cells(job).map(([title, content]) => h("td", { "data-label": title }, content)),
      h("td", {}, job.message && h("small", {}, job.message), !hasEnded(job) && job.mine && h("button", { class: "danger", onclick: () => cancel(job) }, "Cancel job")))))),
    counts.jobs > jobs.length && h("p", { class: "quiet" }, `and ${plural(counts.jobs - jobs.length, "older job")}: see collapipe jobs list`));
}

async function cancel(job) {
  if (!confirm(`Cancel job ${job.id}? Its last commit stays.`)) return;
  try {
    await post(`/api/jobs/${encodeURIComponent(job.id)}/cancel`);
  } catch (error) {
    alert(error.message);
  }
}

async function start() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key) {
    window.history.replaceState(null, "", location.pathname);
    await post("/api/session", { key }).catch((error) => console.warn(error.message));
  }
  element("job").onchange = (event) => choose({ job: event.target.value, round: 0 });
  window.addEventListener("hashchange", () => choose(readRoute()));
  setInterval(again, 1000); // Times left go down.
  listen();
}

start();
