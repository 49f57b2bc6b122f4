// Writes values for people: plain words with units.

const scaled = (value, unit, steps) => {
  const step = steps.findIndex((_, index) => value < 1000 ** (index + 1));
  const index = step < 0 ? steps.length - 1 : step;
  return `${short(value / 1000 ** index)} ${steps[index]}${unit}`;
};

export const short = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 4, useGrouping: value >= 1e4 });
export const rate = (bps) => scaled(bps, "bit/s", ["", "k", "M", "G"]);
export const bytes = (count) => scaled(count, "B", ["", "k", "M", "G", "T"]);
export const percent = (share) => `${Math.round(100 * share)} %`;
export const plural = (count, noun, ending = "s") => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : ending}`;
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
// Metrics by their names. One without a finite value has a dash.
export const sayMetrics = (metrics) =>
  Object.entries(metrics ?? {})
    .map(([name, value]) => `${name} ${isNumber(value) ? short(value) : "–"}`)
    .join(", ");

export function duration(seconds) {
  if (seconds < 10) return `${short(seconds)} s`;
  const whole = Math.round(seconds),
    minutes = Math.floor(whole / 60),
    hours = Math.floor(minutes / 60);
  if (whole < 60) return `${whole} s`;
  if (minutes < 10) return `${minutes} min ${whole % 60} s`;
  if (hours < 1) return `${minutes} min`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

export const ago = (unixSeconds, now) => `${duration(Math.max(0, Math.round(now - unixSeconds)))} ago`;
export const clock = (unixSeconds) => {
  const moment = new Date(1000 * unixSeconds);
  const isToday = moment.toDateString() === new Date().toDateString();
  return isToday ? moment.toLocaleTimeString("en-GB") : day(unixSeconds);
};
export const day = (unixSeconds) =>
  new Date(1000 * unixSeconds).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
