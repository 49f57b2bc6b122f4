// Draws curves with uPlot, in the colours of the page.

import { h } from "./dom.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const drawn = new Map();

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) drawn.get(target)?.plot.setSize({ width: target.clientWidth, height: 220 });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const element of document.querySelectorAll(".chart-area")) draw(element, drawn.get(element)?.chart);
});

// A chart without its curves yet.
export const chart = (key, title, summary) =>
  h(
    "figure",
    { class: "card chart", "data-key": key, role: "group", "aria-label": `${title}. ${summary}` },
    h("figcaption", {}, h("b", {}, title), ` ${summary}`),
    h("div", { class: "chart-area", "data-own": "", "data-key": key, id: `chart-${key}` }),
  );

// Forgets the charts that are not shown any more.
export function forgetHidden() {
  for (const [element, { plot }] of drawn) {
    if (element.isConnected) continue;
    plot.destroy();
    sizes.unobserve(element);
    drawn.delete(element);
  }
}

// Draws data [x, y...] with series [label, colour, {points}] into a chart that is shown. It keeps the plot while its series stay the same.
export function drawInto(key, { unit, series, data, fromZero = false }) {
  const element = document.getElementById(`chart-${key}`);
  if (!element) return;
  const before = drawn.get(element),
    names = JSON.stringify([unit, series]);
  if (before && before.names === names) {
    if (JSON.stringify(before.chart.data) === JSON.stringify(data)) return; // What a person has enlarged stays so.
    before.chart.data = data;
    before.plot.setData(data);
  } else draw(element, { unit, series, data, fromZero }, names);
}

function draw(element, wanted, names = JSON.stringify([wanted?.unit, wanted?.series])) {
  if (!wanted) return;
  drawn.get(element)?.plot.destroy();
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const options = {
    width: element.clientWidth,
    height: 220,
    scales: { x: { time: false }, y: wanted.fromZero ? { range: (plot, low, high) => [0, 1.05 * (high || 1)] } : {} },
    axes: [
      { ...axis, label: "round", labelSize: 18, size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] },
      { ...axis, label: wanted.unit, labelSize: 18, size: 52 },
    ],
    series: [
      { label: "round", value: (plot, value) => (value === null ? "–" : String(Math.round(100 * value) / 100)) },
      ...wanted.series.map(([label, name, options]) => ({
        label,
        stroke: colour(name),
        width: 2,
        spanGaps: true,
        points: { show: options?.points ?? false, size: 7, fill: colour(name) },
        value: (plot, value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(4)))),
      })),
    ],
  };
  drawn.set(element, { plot: new uPlot(options, wanted.data, element), chart: wanted, names });
  sizes.observe(element);
}
