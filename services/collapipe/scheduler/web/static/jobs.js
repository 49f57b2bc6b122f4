// The tabs with all jobs and with the events of one.

import { post } from "./api.js";
import { h } from "./dom.js";
import { bytes, clock, day, plural, sayMetrics } from "./format.js";
import { progressBar } from "./pipeline.js";
import { hasEnded, timeLeft } from "./progress.js";

const BAD = ["HOST_LOST", "HOST_LEFT_OUT", "ATTEMPT_FAILED", "WAITING_FOR_HOSTS", "JOB_GIVEN_UP", "UNUSUAL_CHANGE"];
const GOOD = ["HOST_BACK", "RECOVERED"];
const MOST_EVENTS = 60;

export function jobsTab({ sections: { jobs, job: chosen, counts }, choose, now }) {
  const titles = ["Job", ...cells(jobs[0], now).map(([title]) => title), "Message"];
  return h(
    "section",
    { class: "card" },
    h("h3", {}, plural(counts.jobs, "job")),
    jobs.length > 0 &&
      h(
        "table",
        { class: "jobs" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            titles.map((title) => h("th", { scope: "col" }, title)),
          ),
        ),
        h(
          "tbody",
          {},
          jobs.map((job) =>
            h(
              "tr",
              { "data-key": job.id, class: job.id === chosen?.id ? "chosen" : "" },
              h(
                "th",
                { scope: "row" },
                h(
                  "button",
                  { onclick: () => choose({ job: job.id, round: 0, tab: "now" }), "aria-label": `Look at job ${job.id}` },
                  job.name,
                ),
                h("small", {}, job.id),
              ),
              cells(job, now).map(([title, content]) => h("td", { "data-label": title }, content)),
              h(
                "td",
                { class: "wide" },
                job.message && h("small", {}, job.message),
                !hasEnded(job) && job.mine && h("button", { class: "danger", onclick: () => cancel(job) }, "Cancel job"),
              ),
            ),
          ),
        ),
      ),
    counts.jobs > jobs.length &&
      h("p", { class: "quiet" }, `and ${plural(counts.jobs - jobs.length, "older job")}: see collapipe jobs list`),
    counts.unreadable > 0 &&
      h("p", { class: "quiet" }, `${plural(counts.unreadable, "job")} cannot be read: see collapipe jobs list`),
  );
}

const cells = (job, now) =>
  job === undefined
    ? []
    : [
        ["State", h("span", { class: `state ${job.state}` }, job.state)],
        ["Rounds", [progressBar(job.committed / job.rounds), `${job.committed} of ${job.rounds}`]],
        ["Time", timeLeft(job, now)],
        ["Submitted", job.submitted ? day(job.submitted) : "–"],
        ["Result", sayMetrics(job.evaluation?.metrics) || "–"],
        ["Size", job.stored_bytes ? bytes(job.stored_bytes) : "–"],
        ["Owner", job.owner || "everybody"],
      ];

async function cancel(job) {
  if (!confirm(`Cancel job ${job.id}? Its last commit stays.`)) return;
  try {
    await post(`/api/jobs/${encodeURIComponent(job.id)}/cancel`);
  } catch (error) {
    alert(error.message);
  }
}

export function eventList({ sections }, most) {
  const listed = (sections.job?.events ?? []).slice(-most).reverse();
  if (!listed.length)
    return h("p", { class: "quiet" }, "The scheduler has no events of this job any more. `collapipe jobs report` has those of an ended job.");
  const kind = (event) => (BAD.includes(event.kind) ? "bad" : GOOD.includes(event.kind) ? "good" : "");
  return h(
    "ol",
    { class: "events" },
    listed.map((event) =>
      h("li", { class: kind(event), "data-key": event.number }, h("time", {}, clock(event.at)), h("span", {}, event.text)),
    ),
  );
}

export const eventsTab = (view) =>
  h("section", { class: "card" }, h("h3", {}, "Events of the job since the scheduler started"), eventList(view, MOST_EVENTS));
