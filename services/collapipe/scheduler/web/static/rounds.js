// The tab with past rounds: a slider that replays them, who held what and why, and what every host did.

import { get } from "./api.js";
import { h, svg } from "./dom.js";
import { bytes, duration, isNumber, percent, plural, sayMetrics, short } from "./format.js";
import { pipeline } from "./pipeline.js";

const STEP_SECONDS = 1.2;
const ERROR_SECONDS = 5;
const PHASES = [
  ["configure", "fetch weights"],
  ["evaluation", "evaluate"],
  ["training", "train"],
  ["gather", "push weights"],
];
const details = new Map();
let playing = 0;

// Fetches a round, and calls `again` when it has come. Keeps the last hundred, and an error for some seconds.
function load(key, path, again) {
  if (!details.has(key)) {
    if (details.size >= 100) details.delete(details.keys().next().value);
    details.set(key, { isLoading: true });
    get(path)
      .then(
        (content) => details.set(key, content),
        (error) => {
          details.set(key, { error: error.message });
          setTimeout(() => {
            details.delete(key);
            again();
          }, 1000 * ERROR_SECONDS);
        },
      )
      .finally(again);
  }
  return details.get(key);
}

export const forget = () => details.clear();

export function stopReplay() {
  clearInterval(playing);
  playing = 0;
}

export function roundsTab({ job, rounds, route, choose, again }) {
  if (rounds.length === 0) return h("p", { class: "quiet" }, "Rounds appear here when they are committed.");
  const number = Math.min(Math.max(route.round || rounds.at(-1).round, 1), rounds.at(-1).round);
  const at = Math.max(
      0,
      rounds.findIndex((round) => round.round >= number),
    ),
    shown = rounds[at];
  const show = (position) => choose({ round: rounds[Math.min(Math.max(position, 0), rounds.length - 1)].round });
  const stop = () => {
    stopReplay();
    again();
  };
  const go = (position) => {
    stopReplay();
    show(position);
  };
  const play = () => {
    let position = at === rounds.length - 1 ? 0 : at + 1;
    show(position);
    playing = setInterval(() => ((position += 1) < rounds.length ? show(position) : stop()), 1000 * STEP_SECONDS);
    again();
  };
  const path = `/api/jobs/${encodeURIComponent(job.id)}/rounds/${shown.round}`;
  const detail = load(`${job.id} ${shown.round} ${shown.seconds}`, path, again);
  return [
    h(
      "div",
      { class: "card replay", "data-key": "replay" },
      h("button", { onclick: () => go(at - 1), "aria-label": "Earlier round" }, "◀"),
      h("button", { onclick: playing ? stop : play }, playing ? "Stop" : "Replay"),
      h("button", { onclick: () => go(at + 1), "aria-label": "Later round" }, "▶"),
      h("input", {
        type: "range",
        min: 0,
        max: rounds.length - 1,
        value: at,
        "aria-label": "Round",
        "aria-valuetext": `round ${shown.round}`,
        oninput: (event) => go(Number(event.target.value)),
      }),
      h("output", {}, `Round ${shown.round} of ${job.rounds}`),
    ),
    h("section", { class: "card", "data-key": "round", "aria-live": "polite" }, said(shown, detail)),
    detail.clusters?.map((cluster) => clusterRound(cluster, { job, shown, path, again })),
    detail.num_clusters > detail.clusters?.length &&
      h("p", { class: "quiet" }, `The first ${detail.clusters.length} of ${detail.num_clusters} clusters are shown.`),
    h(
      "details",
      { class: "card", "data-key": "why", open: true },
      h("summary", {}, "Why the scheduler decided so"),
      paragraphs(detail.why ?? []).map((lines) =>
        h("pre", { class: lines.some((line) => isSum(line)) ? "why sum" : "why", tabindex: "0" }, lines.join("\n")),
      ),
    ),
    history(rounds, shown, go),
  ];
}

// Lines under a heading are indented. A line with columns has many spaces within.
const isSum = (line) => / {6,}\S/.test(line.trim());
const paragraphs = (lines) => {
  const parts = [];
  for (const line of lines) {
    if (!line.startsWith(" ") || parts.length === 0) parts.push([]);
    parts.at(-1).push(line);
  }
  return parts;
};

const said = (round, detail) => [
  detail.error && h("p", { class: "waits" }, detail.error),
  h(
    "p",
    {},
    isNumber(round.seconds)
      ? [
          h("b", {}, `took ${duration(round.seconds)}`),
          round.seconds_without_evaluation < round.seconds && `, ${duration(round.seconds_without_evaluation)} without the evaluation`,
          isNumber(round.predicted_seconds) && `, predicted ${duration(round.predicted_seconds)} (${against(round)})`,
        ]
      : "no result was recorded",
    isNumber(round.losses?.at(-1)) && `; loss ${short(round.losses.at(-1))}`,
    isNumber(round.samples_per_second) && `; ${short(round.samples_per_second)} samples/s`,
    round.metrics && `; ${sayMetrics(round.metrics)}`,
    round.late?.length > 0 && `; without cluster${round.late.length > 1 ? "s" : ""} ${round.late.join(", ")}`,
  ),
];

function against(round) {
  const share = round.seconds_without_evaluation / round.predicted_seconds - 1;
  return Math.abs(share) < 0.05 ? "as predicted" : `${percent(Math.abs(share))} ${share > 0 ? "longer" : "shorter"}`;
}

function clusterRound(cluster, { job, shown, path, again }) {
  const key = `trace ${job.id} ${shown.round} ${shown.seconds} ${cluster.cluster}`,
    trace = details.get(key);
  const hosts = cluster.pipeline.map((stage) => ({ ...stage, state: "working", busy: cluster.busy?.[stage.id] }));
  return h(
    "article",
    { class: "card cluster", "data-key": `cluster-${cluster.cluster}` },
    h(
      "header",
      {},
      h("h3", {}, `Cluster ${cluster.cluster}${job.host_clusters ? ` of the job, which is cluster ${job.host_clusters[cluster.cluster]} here` : ""}`),
      h(
        "span",
        { class: "quiet" },
        `${plural(cluster.micro_batches, "micro-batch", "es")} in a step${isNumber(cluster.steps) ? `, ${cluster.steps} steps` : ""}; pushes ${cluster.upload_codec}${cluster.pushed_bytes ? ` (${bytes(cluster.pushed_bytes)})` : ""}`,
      ),
    ),
    pipeline(hosts, cluster.links, cluster.bottleneck, 0),
    cluster.phases && phases(cluster.phases),
    trace
      ? trace.error
        ? h("p", { class: "waits" }, trace.error)
        : trace.isLoading
          ? h("p", { class: "quiet" }, "asks the hosts …")
          : gantt(trace)
      : h(
          "button",
          {
            onclick: () => {
              load(key, `${path}/trace?cluster=${cluster.cluster}`, again);
              again();
            },
          },
          "Show what every host did, and when",
        ),
  );
}

// The parts of a round of a cluster, as one bar.
function phases(parts) {
  const listed = PHASES.map(([name, words]) => [name, words, parts[name] ?? 0]).filter(([, , seconds]) => seconds > 0);
  const whole = listed.reduce((sum, [, , seconds]) => sum + seconds, 0);
  let x = 0;
  return h(
    "div",
    { class: "phases" },
    svg(
      "svg",
      { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
      listed.map(([name, , seconds]) => {
        const rect = svg("rect", { class: `phase ${name}`, x, width: (100 * seconds) / whole, height: 6 });
        x += (100 * seconds) / whole;
        return rect;
      }),
    ),
    h(
      "ul",
      { class: "legend" },
      listed.map(([name, words, seconds]) => h("li", { class: `phase ${name}` }, `${words} ${duration(seconds)}`)),
    ),
  );
}

// What every host did: one line for what it computes, one for what it moves.
function gantt(trace) {
  const width = 1000,
    row = 15,
    moves = new Set(["weights", "activations"]),
    order = ["weights", ...trace.kinds.filter((kind) => kind !== "weights")];
  const lines = trace.hosts.flatMap((host) =>
    [
      [host, "computes"],
      [host, "moves"],
    ].filter(([, way]) => Object.keys(host.bars).some((kind) => moves.has(kind) === (way === "moves"))),
  );
  const kindClass = (kind) => kind.split(/[ ,]/)[0];
  return h(
    "figure",
    { class: "gantt" },
    h("figcaption", {}, `${duration(trace.seconds)} from left to right`),
    h(
      "div",
      { class: "gantt-rows", role: "img", "aria-label": `What ${trace.hosts.length} hosts did in ${duration(trace.seconds)}` },
      lines.map(([host, way]) =>
        h(
          "div",
          {},
          h("span", {}, way === "computes" ? h("b", {}, host.id) : "", ` ${way}`),
          svg(
            "svg",
            { viewBox: `0 0 ${width} ${row}`, preserveAspectRatio: "none" },
            svg("rect", { class: "all", width, height: row }),
            order
              .filter((kind) => host.bars[kind] && moves.has(kind) === (way === "moves"))
              .map((kind) =>
                svg("path", {
                  class: `kind ${kindClass(kind)}`,
                  d: host.bars[kind]
                    .map(
                      ([start, end]) =>
                        `M${((width * start) / trace.seconds).toFixed(1)} 1h${Math.max(0.6, (width * (end - start)) / trace.seconds).toFixed(1)}v${row - 2}H${((width * start) / trace.seconds).toFixed(1)}z`,
                    )
                    .join(""),
                }),
              ),
          ),
        ),
      ),
    ),
    h(
      "ul",
      { class: "legend" },
      trace.kinds.map((kind) => h("li", { class: `kind ${kindClass(kind)}` }, kind)),
    ),
    Object.entries(trace.missing).map(([, reason]) => h("p", { class: "quiet" }, reason)),
  );
}

// The plan of each round beside that of the round before.
function history(rounds, shown, go) {
  return h(
    "details",
    { class: "card", "data-key": "history", open: true },
    h("summary", {}, "History of plans (times without the evaluation)"),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["Round", "Took", "Predicted", "Loss", "Who holds what"].map((title) => h("th", { scope: "col" }, title)),
          ),
        ),
        h(
          "tbody",
          {},
          rounds
            .map((round, index) => [round, index, changes(rounds[index - 1], round)])
            .reverse()
            .map(([round, index, changed]) =>
              h(
                "tr",
                { class: round === shown ? "chosen" : "", "data-key": round.round },
                h(
                  "th",
                  { scope: "row" },
                  h(
                    "button",
                    { onclick: () => go(index), "aria-label": `Show round ${round.round}` },
                    String(round.round),
                  ),
                ),
                h("td", { "data-label": "Took" }, isNumber(round.seconds) ? duration(round.seconds_without_evaluation) : "–"),
                h("td", { "data-label": "Predicted" }, isNumber(round.predicted_seconds) ? duration(round.predicted_seconds) : "–"),
                h("td", { "data-label": "Loss" }, isNumber(round.losses?.at(-1)) ? short(round.losses.at(-1)) : "–"),
                h("td", { "data-label": "Plan", class: "wide" }, changed),
              ),
            ),
        ),
      ),
    ),
  );
}

function changes(before, round) {
  if (!round.holders) return "no record";
  const units = (holders) => new Map(holders.flat().map(([id, words]) => [id, words]));
  const after = units(round.holders);
  if (!before?.holders)
    return [...after]
      .filter(([, words]) => words.includes("block"))
      .map(([id, words]) => `${id}: ${words}`)
      .join("; ");
  const earlier = units(before.holders);
  const moved = [...new Set([...earlier.keys(), ...after.keys()])].filter((id) => earlier.get(id) !== after.get(id));
  if (moved.length === 0) return round.kept_because ? `as before (${round.kept_because})` : "as before";
  return moved.map((id) => `${id}: ${earlier.get(id) ?? "nothing"} → ${after.get(id) ?? "nothing"}`).join("; ");
}
