// The list of jobs, looked at again every two seconds while the page is seen.

import { get } from "./api.js";
import { h, renew, seconds, table } from "./dom.js";

const AGAIN_MS = 2000;
const PAGE = 50, MOST = 1000;

const STEERS = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
/** A name from a file, whose signs that end lines or turn the direction of the text around it are written out. */
const plain = (name) => name.replace(STEERS, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
export const place = (request) =>
  plain(typeof request?.cluster === "string" ? request.cluster : request?.cluster?.name || "a cluster of its own");
export const model = (job) => plain(job.request?.model.name || job.model_id.slice(0, 12) || "a model");
export const state = (name) => h("span", { class: `state state-${name}` }, name);

export function bar(job, progress = job.progress) {
  if (job.state === "queued") return h("span", { class: "quiet" }, "waits");
  const fraction = job.state === "succeeded" ? 1 : progress?.fraction ?? 0;
  return h("progress", { value: fraction, max: 1, "aria-label": `Progress of ${model(job)}` }, `${Math.round(100 * fraction)} %`);
}

export async function showJobs(root, signal) {
  document.title = "Jobs · AutoMAP";
  const list = h("div"), notice = h("div", { role: "status" });
  const older = h("button", { type: "button", hidden: true, onclick: more }, "Show older jobs");
  root.append(h("h1", {}, "Jobs"), notice, list, h("p", {}, older));
  let before = "", limit = PAGE;

  async function look() {
    const { jobs, next } = await get(`/v1/jobs?limit=${limit}`, signal);
    const now = JSON.stringify(jobs);
    // Untouched while nothing changes, so that a text that is being selected stays selected.
    if (now !== before) renew(list, jobs.length ? rows(jobs) : nothing());
    before = now;
    older.hidden = !next || limit === MOST;
    notice.replaceChildren();
  }

  /** A service that is away for a moment, as at a restart, is asked again. */
  async function patiently() {
    try {
      await look();
    } catch (fault) {
      if (signal.aborted || fault.document?.status < 500) throw fault;
      notice.replaceChildren(h("p", { class: "fault" }, `${fault.message} The page tries again every two seconds.`));
    }
  }

  async function more() {
    limit = Math.min(MOST, limit + PAGE);
    await patiently();
  }

  for (;;) {
    if (!document.hidden) await patiently();
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    if (signal.aborted) return;
  }
}

const nothing = () => h("p", {}, "There are no jobs yet. ", h("a", { href: "#/new" }, "Start a search."));

function rows(jobs) {
  return table("The latest jobs, newest first", [["model"], ["cluster"], ["state"], ["progress"], ["best step", true], ["submitted"]],
    jobs.map((job) => [
      h("a", { href: `#/jobs/${job.id}`, title: model(job) }, model(job)),
      place(job.request),
      state(job.state),
      bar(job),
      seconds(job.progress?.best_step_time_s),
      new Date(1000 * job.created_at).toLocaleString(),
    ]));
}
