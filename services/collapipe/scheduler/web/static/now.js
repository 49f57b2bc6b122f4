// The tab with the present: clusters, what is special about them, and the last events.

import { h } from "./dom.js";
import { plural } from "./format.js";
import { eventList } from "./jobs.js";
import { clusterCard, clusterTile, hostBox } from "./pipeline.js";
import { hasEnded } from "./progress.js";

const FILTERS = [
  ["all", "all"],
  ["problems", "with problems"],
  ["working", "that work"],
  ["idle", "without a job"],
];
const LEGEND = [
  ["working", "works"],
  ["idle", "idle"],
  ["suspected", "suspected"],
  ["lost", "lost"],
];
const MOST_OPEN = 12;
let filter = "all";

export function nowTab(view) {
  const {
    sections: { clusters, details, edge, jobs },
    now,
  } = view;
  if (!clusters.length) return h("p", { class: "card" }, "No host has registered yet. This takes up to a minute after the start.");
  const byIndex = new Map(clusters.map((one) => [one.index, one])),
    names = new Map(jobs.map((one) => [one.id, one.name]));
  const isMany = view.route.clusters.length > 0 || clusters.some((cluster) => !details[cluster.index]);
  const open = Object.keys(details)
    .map(Number)
    .filter((index) => byIndex.has(index));
  const waiting = jobs.filter((one) => one.queue_position).length;
  return [
    open.length > 0 &&
      h(
        "div",
        { class: "clusters" },
        open.map((index) => {
          const summary = byIndex.get(index),
            onClose = isMany ? () => toggle(view, index) : null;
          return clusterCard(summary, details[index], names.get(summary.job) ?? summary.job, now, onClose);
        }),
      ),
    isMany && tiles(view),
    edgeServers(
      edge,
      open.some((index) => details[index].pipeline.length),
      now,
    ),
    h(
      "section",
      { class: "card", "data-key": "last" },
      h("h3", {}, "Last events"),
      eventList(view, 5),
      waiting > 0 && h("p", {}, `${plural(waiting, "job")} in the queue: see Jobs.`),
    ),
  ];
}

// Pipelines show the edge server, too.
function edgeServers(edge, isShown, now) {
  if (!edge.length) return h("p", { class: "waits" }, "No edge server has registered: start one.");
  if (isShown) return null;
  return h(
    "article",
    { class: "card", "data-key": "edge", "aria-label": "Edge server" },
    h("header", {}, h("h3", {}, "For all clusters")),
    h(
      "ul",
      { class: "pipeline" },
      edge.map((host) => hostBox(host, { now })),
    ),
  );
}

function tiles(view) {
  const {
    sections: { clusters, counts },
    route,
    again,
  } = view;
  const slowest = view.sections.job?.held_back?.[0]?.cluster;
  const isShown = (one) => ({ all: true, problems: one.lost || one.suspected, working: one.working, idle: !one.job })[filter];
  const choose = (event) => {
    filter = event.target.value;
    again();
  };
  return h(
    "section",
    { class: "card", "data-key": "tiles", "aria-label": "All clusters" },
    h(
      "header",
      {},
      h("h3", {}, `${plural(counts.clusters, "cluster")} with ${plural(counts.devices, "device")}`),
      h(
        "label",
        {},
        "Show clusters ",
        h(
          "select",
          { onchange: choose },
          FILTERS.map(([id, words]) => h("option", { value: id, selected: filter === id }, words)),
        ),
      ),
      h(
        "ul",
        { class: "legend" },
        LEGEND.map(([state, words]) => h("li", { class: `state ${state}` }, words)),
      ),
    ),
    h("p", { class: "quiet" }, "A square is a host. Press a cluster to see its hosts and links."),
    h(
      "div",
      { class: "tiles" },
      clusters
        .filter(isShown)
        .map((one) =>
          clusterTile(one, {
            isOpen: route.clusters.includes(one.index),
            isSlowest: one.index === slowest,
            onToggle: () => toggle(view, one.index),
          }),
        ),
    ),
    counts.clusters > clusters.length && h("p", { class: "quiet" }, `and ${plural(counts.clusters - clusters.length, "more cluster")}`),
  );
}

const toggle = ({ route: { clusters }, choose }, index) =>
  choose({ clusters: clusters.includes(index) ? clusters.filter((one) => one !== index) : [...clusters, index].slice(-MOST_OPEN) });
