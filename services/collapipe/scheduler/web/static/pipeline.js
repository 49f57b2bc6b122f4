// Draws clusters: their hosts in the order of the pipeline, and the links between them.

import { h, svg } from "./dom.js";
import { ago, bytes, isNumber, percent, plural, rate } from "./format.js";

const ROLES = { "control unit": "has the data", device: "device", "edge server": "averages the clusters" };

const bar = (share, kind) =>
  svg(
    "svg",
    { class: `bar ${kind}`, viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "all", width: 100, height: 6 }),
    svg("rect", { class: "part", width: Math.min(100, 100 * share), height: 6 }),
  );

export const progressBar = (share) => bar(share, "progress");

export function hostBox(host, { isBottleneck = false, now = 0 } = {}) {
  const isLost = host.state === "lost";
  // A limit is for what the plan needs. A process takes more, for its code.
  const isLimited = host.limit_bytes && isNumber(host.needs_bytes);
  const [memory, limit] = isLimited ? [host.needs_bytes, host.limit_bytes] : [host.memory_bytes, null];
  return h(
    "li",
    { class: `host ${host.state ?? "working"} ${isBottleneck && !isLost ? "bottleneck" : ""}`, "data-key": host.id },
    h("div", { class: "host-name" }, h("b", {}, host.id), h("small", {}, ROLES[host.role] ?? host.role ?? "")),
    host.units && h("div", { class: "units" }, host.units),
    !isLost && isNumber(host.busy) && h("div", { class: "measure" }, bar(host.busy, "busy"), h("span", {}, `${percent(host.busy)} busy`)),
    !isLost &&
      isNumber(memory) &&
      h(
        "div",
        { class: "measure" },
        limit && bar(memory / limit, memory > 0.95 * limit ? "memory full" : "memory"),
        h("span", {}, `${bytes(memory)}${limit ? ` of ${bytes(limit)}` : " memory"}`),
      ),
    isBottleneck && !isLost && h("div", { class: "badge" }, "holds its cluster back"),
    isLost && h("div", { class: "badge" }, host.refusal ? "refused" : host.last_seen ? `lost: last heartbeat ${ago(host.last_seen, now)}` : "lost: not registered"),
    host.state === "suspected" && h("div", { class: "badge", title: host.suspicion }, "suspected, and left out for a while"),
    host.unshaped && h("div", { class: "badge", title: host.unshaped }, "unshaped links"),
  );
}

// A link moves as fast as its rate, in five steps from about 30 kbit/s to more than 100 Mbit/s.
const speed = (bps) => (isNumber(bps) && bps > 0 ? Math.max(1, Math.min(5, Math.floor(Math.log10(bps)) - 3)) : 0);

function linkBox(link, { isBottleneck = false, isCut = false } = {}) {
  const limit = link.limit_bps
    ? `limit ${rate(link.limit_bps)}`
    : link.bandwidth_hz
      ? `${(link.bandwidth_hz / 1e6).toPrecision(3)} MHz`
      : "";
  const line = (y, way, bps) => svg("line", { class: `flow ${way} speed-${isCut ? 0 : speed(bps)}`, x1: 0, x2: 100, y1: y, y2: y });
  const said = (arrow, bps) => (isNumber(bps) && bps > 0 ? `${arrow} ${rate(bps)}` : "");
  const words = [said("→", link.forward_bps), said("←", link.backward_bps)].filter(Boolean).join(", ") || "no traffic";
  return h(
    "li",
    {
      class: `link ${isBottleneck ? "bottleneck" : ""} ${isCut ? "cut" : ""}`,
      "data-key": `${link.from}>${link.to}`,
      "aria-label": `link from ${link.from} to ${link.to}: ${words} ${limit}`,
    },
    h("span", { class: "rate" }, said("→", link.forward_bps)),
    svg(
      "svg",
      { class: "wires", viewBox: "0 0 100 16", preserveAspectRatio: "none", "aria-hidden": "true" },
      line(4, "forward", link.forward_bps),
      line(12, "backward", link.backward_bps),
    ),
    h("span", { class: "rate" }, said("←", link.backward_bps)),
    (limit || link.codec !== "fp32" || isBottleneck) &&
      h(
        "span",
        { class: "limit" },
        isBottleneck && h("b", { class: "badge" }, "holds its cluster back"),
        limit,
        link.codec !== "fp32" && ` ${link.codec}`,
      ),
  );
}

// The hosts and links of a pipeline. `bottleneck` is as the scheduler names it: "stage 2", "link 1",
// "forward link 1", "backward link 1", "window 0", "edge server".
export function pipeline(hosts, links, bottleneck, now) {
  const [number, kind] = (bottleneck ?? "").split(" ").reverse();
  const marked = ["stage", "window"].includes(kind) ? Number(number) : bottleneck === "edge server" ? hosts.length - 1 : -1;
  return h(
    "ol",
    { class: "pipeline" },
    hosts.map((host, index) => [
      hostBox(host, { isBottleneck: index === marked, now }),
      index < hosts.length - 1 &&
        linkBox(links[index] ?? { from: host.id, to: hosts[index + 1].id, codec: "fp32" }, {
          isBottleneck: kind === "link" && Number(number) === index,
          isCut: [host.state, hosts[index + 1].state].includes("lost"),
        }),
    ]),
  );
}

// The card of a cluster with its hosts.
export function clusterCard(summary, detail, jobName, now, onClose) {
  const hasSteps = isNumber(summary.steps) && summary.steps > 0;
  return h(
    "article",
    { class: "card cluster", "data-key": `cluster-${summary.index}`, "aria-label": `Cluster ${summary.index}` },
    h(
      "header",
      {},
      h("h3", {}, `Cluster ${summary.index}`),
      hasSteps &&
        h("span", { class: "steps" }, progressBar(summary.steps_done / summary.steps), `step ${summary.steps_done} of ${summary.steps}`),
      isNumber(summary.samples_per_second) && summary.samples_per_second > 0 && h("span", {}, `${summary.samples_per_second} samples/s`),
      h("span", { class: "quiet" }, jobName ? `trains ${jobName}` : "no job"),
      onClose && h("button", { onclick: onClose, "aria-label": `Close cluster ${summary.index}` }, "Close"),
    ),
    summary.waiting_for && h("p", { class: "waits" }, summary.waiting_for),
    detail.pipeline.length > 0 && pipeline(detail.pipeline, detail.links, detail.bottleneck, now),
    detail.others.length > 0 &&
      h(
        "div",
        { class: "others" },
        detail.pipeline.length > 0 && h("h4", {}, "Not in this round"),
        h(
          "ul",
          { class: "pipeline" },
          detail.others.map((host) => hostBox(host, { now })),
        ),
      ),
    detail.more > 0 && h("p", { class: "quiet" }, `and ${plural(detail.more, "more host")}`),
  );
}

const STATES = ["lost", "suspected", "working", "idle"];

// Many clusters: one small tile for each, with a square for each host.
export function clusterTile(summary, { isOpen, isSlowest, onToggle }) {
  const squares = STATES.flatMap((state) => Array(Math.min(summary[state], 60)).fill(state));
  const words = STATES.filter((state) => summary[state])
    .map((state) => `${summary[state]} ${state}`)
    .join(", ");
  const share = summary.steps ? summary.steps_done / summary.steps : 0;
  return h(
    "button",
    {
      class: `tile ${summary.lost ? "lost" : summary.suspected ? "suspected" : isSlowest ? "bottleneck" : ""}`,
      "data-key": summary.index,
      "aria-expanded": String(isOpen),
      onclick: onToggle,
    },
    h("b", {}, `Cluster ${summary.index}`),
    svg(
      "svg",
      { class: "squares", viewBox: `0 0 144 ${12 * Math.ceil(squares.length / 12)}`, "aria-hidden": "true" },
      squares.map((state, index) =>
        svg("rect", { class: state, x: 12 * (index % 12), y: 12 * Math.floor(index / 12), width: 10, height: 10, rx: 2 }),
      ),
    ),
    h("span", {}, words),
    isSlowest && h("span", { class: "badge" }, "holds the job back"),
    summary.steps
      ? h("span", { class: "steps" }, progressBar(share), `step ${summary.steps_done} of ${summary.steps}`)
      : h("span", { class: "quiet" }, summary.job ? "prepares" : "no job"),
  );
}
