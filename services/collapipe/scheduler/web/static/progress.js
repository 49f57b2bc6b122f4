// The summary of a job, and its curves.

import { chart, drawInto } from "./charts.js";
import { h, svg } from "./dom.js";
import { clock, duration, isNumber, percent, plural, sayMetrics, short } from "./format.js";
import { progressBar } from "./pipeline.js";

const MOST_HOSTS = 8; // Of those with a problem that are named.
const ENDED = ["succeeded", "failed", "cancelled"];
export const hasEnded = (job) => ENDED.includes(job.state);

const tile = (key, title, value, note, extra, kind = "") =>
  h(
    "div",
    { class: `card fact ${kind}`, "data-key": key },
    h("h2", {}, title),
    h("p", { class: "value" }, value),
    extra,
    note && h("p", { class: "quiet" }, note),
  );

export function timeLeft(job, now) {
  if (hasEnded(job)) return job.submitted ? `${job.state} after ${duration(job.ended - job.submitted)}` : job.state;
  if (job.queue_position) return `number ${job.queue_position} in the queue`;
  if (!isNumber(job.ends?.middle)) return job.state === "preparing" ? "prepares data, model and hosts" : "no estimate yet";
  const [low, middle, high] = ["low", "middle", "high"].map((name) => duration(Math.max(0, job.ends[name] - now)));
  return `about ${middle} left${low !== high ? ` (${low} to ${high})` : ""}`;
}

// All losses as [position in rounds, loss].
export const losses = (rounds) =>
  rounds.flatMap(({ round, losses = [] }) => losses.map((loss, index) => [round - 1 + (index + 1) / losses.length, loss]));

function sparkline(points) {
  const values = points.map(([, loss]) => loss).filter(isNumber);
  if (values.length < 2) return null;
  const low = Math.min(...values),
    high = Math.max(...values),
    step = Math.max(1, Math.floor(values.length / 120));
  const shown = values.filter((_, index) => index % step === 0);
  const line = shown
    .map(
      (value, index) => `${((100 * index) / (shown.length - 1)).toFixed(1)},${(22 - (20 * (value - low)) / (high - low || 1)).toFixed(1)}`,
    )
    .join(" ");
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("polyline", { points: line }),
  );
}

// The five facts that matter: progress, loss, metric, speed, bottleneck.
export function summary({ job, rounds, sections, now }) {
  const detail = sections.job?.id === job.id ? sections.job : null;
  const isRunning = job.state === "running";
  const number = isRunning && detail?.round ? detail.round : job.committed;
  const points = losses(rounds),
    last = detail?.loss ?? points.at(-1)?.[1],
    first = points[0]?.[1];
  const lost = Object.values(sections.details ?? {})
    .flatMap((each) => each.pipeline)
    .find((host) => host.state === "lost");
  const speed = isRunning ? detail?.samples_per_second : rounds.at(-1)?.samples_per_second;
  return [
    tile(
      "progress",
      "Progress",
      number ? `round ${number} of ${job.rounds.toLocaleString("en")}` : job.state,
      `${job.state === "running" || hasEnded(job) ? "" : `${job.state}, `}${timeLeft(job, now)}`,
      progressBar(hasEnded(job) ? job.committed / job.rounds : (job.done ?? job.committed / job.rounds)),
    ),
    tile(
      "loss",
      "Loss",
      isNumber(last) ? short(last) : "–",
      isNumber(first) ? `began at ${short(first)}` : "lower is better",
      sparkline(points),
    ),
    job.evaluation &&
      tile(
        "metric",
        job.evaluation.metric,
        isNumber(job.evaluation.value) ? short(job.evaluation.value) : "–",
        `on ${plural(job.evaluation.rows, "held-out row")}, after round ${job.evaluation.round}`,
        otherMetrics(job.evaluation),
      ),
    tile(
      "speed",
      "Speed",
      isNumber(speed) && speed > 0 ? `${short(speed)} samples/s` : "–",
      !isRunning ? "in the last round" : speed > 0 ? "all clusters together, now" : "not known yet",
    ),
    heldBack(lost, detail?.held_back ?? []),
  ];
}

function otherMetrics({ metric, metrics, one_answer: isOne }) {
  const { [metric]: main, ...others } = metrics ?? {};
  return [
    h("p", { class: "quiet" }, sayMetrics(others)),
    isOne && h("p", { class: "quiet" }, "Every row gets the same answer."),
  ];
}

// What a job would have to speed up: the busiest part, by the shares that the pipelines show. A lost host comes first.
function heldBack(lost, clusters) {
  const words = clusters.map(({ cluster, by, share, is_measured: isMeasured }) => {
    const [part, seconds] = by.split(": ");
    const busy = isNumber(share) && `${percent(share)} busy${isMeasured ? "" : ", as predicted"}`;
    return [cluster, part, [seconds, busy].filter(Boolean).join(", ")];
  });
  if (lost) return tile("limit", "Held back by", lost.id, "is lost, and its cluster needs it", null, "limit");
  if (!words.length) return null;
  const [[cluster, part, seconds], other] = words;
  return tile(
    "limit",
    "Held back by",
    part,
    `cluster ${cluster}: ${seconds}${other ? `; cluster ${other[0]}: ${other[1]}` : ""}`,
    null,
    "limit",
  );
}

// What is wrong, in whole sentences: [{text, id, isWarning}], with the id of a host. Empty if nothing is.
export function problems({ job, sections }) {
  const found = [],
    details = Object.values(sections.details ?? {});
  const named = new Set(),
    unshaped = [];
  for (const host of details.flatMap((detail) => [...detail.pipeline, ...detail.others]).concat(sections.edge ?? [])) {
    if (named.has(host.id)) continue;
    named.add(host.id);
    if (host.unshaped) unshaped.push(host);
    if (host.refusal) found.push({ id: host.id, text: `${host.id} is refused: ${host.refusal}` });
    else if (host.state === "lost")
      found.push({
        id: host.id,
        text: `${host.id} is lost: ${host.last_seen ? `no heartbeat since ${clock(host.last_seen)}` : "it has not registered"}. Start it again, or look at its network.`,
      });
    if (host.twin)
      found.push({ id: host.id, text: `Two processes call themselves ${host.id}, at ${host.twin}, and the second one is refused. Give one of them another name, or stop it.` });
    if (host.state === "suspected")
      found.push({ id: host.id, text: `${host.id} is suspected, and left out for a while: ${host.suspicion}` });
  }
  if (found.length > MOST_HOSTS) {
    const more = plural(found.length - MOST_HOSTS, "more host");
    found.splice(MOST_HOSTS, Infinity, { text: `The view Now shows ${more} with such a problem.` });
  }
  for (const [state, words] of [
    ["lost", "sent no heartbeat for 10 s"],
    ["suspected", "could not be reached by others: left out for a while"],
  ]) {
    const unnamed = (sections.clusters ?? []).filter((cluster) => cluster[state] && !sections.details?.[cluster.index]);
    if (!unnamed.length) continue;
    const count = unnamed.reduce((sum, cluster) => sum + cluster[state], 0);
    const some = unnamed.slice(0, 6).map((cluster) => cluster.index);
    const more = unnamed.length > 6 ? ", …" : "";
    found.push({ text: `${plural(count, "host")} of ${plural(unnamed.length, "cluster")} (${some.join(", ")}${more}) ${words}.` });
  }
  if (unshaped.length) {
    const [{ id, unshaped: reason }] = unshaped;
    found.push({ text: `Warning: the links of ${plural(unshaped.length, "host")} here are not shaped. ${id}: ${reason}`, isWarning: true });
  }
  if (!job) return found;
  const detail = sections.job?.id === job.id ? sections.job : null;
  for (const line of detail?.trouble ?? []) addTrouble(found, line.split(/(?<=[.]) /)[0]);
  if (job.state === "failed") found.push({ text: `The job failed: ${job.message}` });
  for (const { text } of detail?.warnings ?? []) found.push({ text: `Warning: ${text}`, isWarning: true });
  return found;
}

// Adds a sentence about a job. What it does about a host that has a box is told there.
function addTrouble(found, line) {
  const [, does, id] = line.match(/^The job (waits for|goes on without) ([^\s:]+)(?=:|$)/) ?? [];
  const told = does && found.find((one) => one.id === id);
  if (told) told.text = `${told.text.replace(/[.]?$/, ".")} The job ${does} it.`;
  else found.push({ text: line, id });
}

const metrics = (rounds) => Object.keys(rounds.find((round) => round.metrics)?.metrics ?? {}).slice(0, 4);

const caption = (definition) =>
  `${definition ? `${definition}; ` : ""}on held-out rows, after each round that measured it`;

// The tab with the curves of a job.
export const curves = ({ rounds, job }) =>
  rounds.length === 0
    ? h("p", { class: "quiet" }, "Curves appear when the first round is committed.")
    : [
        chart("loss", "Loss", "of each step, mean over the clusters"),
        metrics(rounds).map((name) => chart(`metric-${name}`, name, caption(job.evaluation?.definitions?.[name]))),
        chart("speed", "Speed", "rows that all clusters trained in a second"),
        chart("time", "Time of a round", "without its evaluation, as the scheduler predicted it, and as it was"),
        rounds.some((round) => Object.keys(round.queues ?? {}).length) &&
          chart("queues", "Energy backlog", `of ${job.strategy}: energy used beyond the budget, in budgets of a round`),
      ];

export function drawCurves({ rounds }) {
  const points = losses(rounds),
    x = rounds.map((round) => round.round),
    of = (read) => rounds.map((round) => read(round) ?? null);
  drawInto("loss", { unit: "loss", series: [["loss", "--busy"]], data: [points.map(([at]) => at), points.map(([, loss]) => loss)] });
  const hues = ["--busy", "--good", "--bottleneck", "--quiet"];
  for (const name of metrics(rounds))
    drawInto(`metric-${name}`, {
      unit: name,
      series: [[name, "--busy", { points: true }]],
      data: [x, of((round) => round.metrics?.[name])],
    });
  drawInto("speed", {
    unit: "samples/s",
    fromZero: true,
    series: [["samples/s", "--busy", { points: rounds.length < 40 }]],
    data: [x, of((round) => round.samples_per_second)],
  });
  drawInto("time", {
    unit: "seconds",
    fromZero: true,
    series: [
      ["took", "--busy", { points: rounds.length < 40 }],
      ["predicted", "--bottleneck"],
    ],
    data: [x, of((round) => round.seconds_without_evaluation), of((round) => round.predicted_seconds)],
  });
  const queues = [...new Set(rounds.flatMap((round) => Object.keys(round.queues ?? {})))].slice(0, 7);
  drawInto("queues", {
    unit: "round budgets",
    series: queues.map((id, index) => [id, [...hues, "--lost", "--text", "--memory"][index]]),
    data: [x, ...queues.map((id) => of((round) => round.queues?.[id]))],
  });
}
