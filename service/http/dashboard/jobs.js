// The list of jobs, a page of it at a time, looked at again every two seconds while the page is seen.

import { get, sleep } from "./api.js";
import { h, renew, seconds, table } from "./dom.js";

const AGAIN_MS = 2000;
const PAGE = 50;

const STEERS = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
/** A name from a file, whose signs that end lines or turn the direction of the text around it are written out. */
const plain = (name) => name.replace(STEERS, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
export const place = (request) => (request?.gnn ? `${request.gnn.machines.length} machines`
  : plain(typeof request?.cluster === "string" ? request.cluster : request?.cluster?.name || "a cluster of its own"));
export const model = (job) => plain(job.request?.gnn?.name || job.request?.model.name || job.model_id.slice(0, 12) || "a model");
export const state = (name) => h("span", { class: `state state-${name}` }, name);

export function bar(job, progress = job.progress) {
  if (job.state === "queued") return h("span", { class: "quiet" }, "waits");
  const fraction = job.state === "succeeded" ? 1 : progress?.fraction ?? 0;
  return h("progress", { value: fraction, max: 1, "aria-label": `Progress of ${model(job)}` }, `${Math.round(100 * fraction)} %`);
}

/** The newest jobs, or those behind a cursor. An older page has an address of its own, so that the browser goes back. */
export async function showJobs(root, cursor, signal) {
  document.title = cursor ? "Older jobs · AutoMAP" : "Jobs · AutoMAP";
  const list = h("div"), notice = h("div", { role: "status" });
  const older = h("a", { hidden: true }, "Older jobs"), newest = h("a", { href: "#/", hidden: !cursor }, "Newest jobs");
  root.append(h("h1", {}, cursor ? "Older jobs" : "Jobs"), notice, list,
    h("nav", { class: "buttons", "aria-label": "Pages of jobs" }, newest, older));
  let before = "";

  async function look() {
    const { jobs, next } = await get(`/v1/jobs?limit=${PAGE}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`, signal);
    const now = JSON.stringify(jobs);
    // Untouched while nothing changes, so that a text that is being selected stays selected.
    if (now !== before) renew(list, jobs.length ? rows(jobs, cursor) : nothing(cursor));
    before = now;
    older.hidden = !next;
    if (next) older.href = `#/older/${next}`;
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

  for (;;) {
    if (!document.hidden) await patiently();
    await sleep(AGAIN_MS);
    if (signal.aborted) return;
  }
}

const nothing = (cursor) => (cursor ? h("p", {}, "There are no older jobs.")
  : h("p", {}, "There are no jobs yet. ", h("a", { href: "#/new" }, "Start a search.")));

function rows(jobs, cursor) {
  return table(cursor ? "Older jobs, newest first" : "The latest jobs, newest first", [["model"], ["cluster"], ["state"], ["progress"], ["best step", true], ["submitted"]],
    jobs.map((job) => [
      h("a", { href: `#/jobs/${job.id}`, title: model(job) }, model(job)),
      place(job.request),
      state(job.state),
      bar(job),
      seconds(job.progress?.best_step_time_s),
      new Date(1000 * job.created_at).toLocaleString(),
    ]));
}
