// The list of jobs, a page of it at a time, looked at again every two seconds while the page is seen.

import { get, sleep } from "./api.js";
import { h, renew, seconds, table } from "./dom.js";

export const AGAIN_MS = 2000;
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
  const text = `${Math.round(100 * fraction)} %`;
  return h("progress", { value: fraction, max: 1, "aria-label": `Progress of ${model(job)}`, "aria-valuetext": text }, text);
}

/** Says in a place of the page that no worker is there to run the jobs that wait, where some do; else empties it. */
export async function showIfNoWorker(root, someWait, signal) {
  // A proxy may keep this address to itself; the jobs wait all the same.
  const ready = someWait ? await get("readyz", signal).catch(() => null) : null;
  if (ready?.workers !== 0) root.replaceChildren();
  else if (!root.hasChildNodes()) {  // a text that is already there is not said a second time
    root.append(h("p", { class: "fault" }, "The service has no worker now. Jobs wait until one starts (", h("code", {}, "automap worker"), ")."));
  }
}

/** Which jobs are shown, by the last part of their address: its words, and the states that are asked for. */
const CHOICES = {
  "": ["all", []], unfinished: ["not ended", ["queued", "running"]], succeeded: ["succeeded", ["succeeded"]],
  failed: ["failed", ["failed"]], cancelled: ["cancelled", ["cancelled"]],
};

/** The newest jobs of a choice, or those behind a cursor. Each page has an address, so that the browser goes back. */
export async function showJobs(root, choice, cursor, signal) {
  document.title = cursor ? "Older jobs · AutoMAP" : "Jobs · AutoMAP";
  const list = h("div", { class: "awaited" }), notice = h("div", { role: "status" }), workers = h("div", { role: "status" });
  const older = h("a", { hidden: true }, "Older jobs"), home = choice ? `#/state/${choice}` : "#/";
  const newest = h("a", { href: home, hidden: !cursor }, "Newest jobs");
  const query = [`limit=${PAGE}`, ...(CHOICES[choice]?.[1] ?? [choice]).map((name) => `state=${encodeURIComponent(name)}`),
    ...(cursor ? [`cursor=${encodeURIComponent(cursor)}`] : [])].join("&");
  root.append(h("h1", {}, cursor ? "Older jobs" : "Jobs"), choices(choice), notice, workers, list,
    h("nav", { class: "buttons", "aria-label": "Pages of jobs" }, newest, older));
  let before = "";

  async function look() {
    const { jobs, next } = await get(`v1/jobs?${query}`, signal);
    const now = JSON.stringify(jobs);
    // Untouched while nothing changes, so that a text that is being selected stays selected.
    if (now !== before) renew(list, jobs.length ? rows(jobs, cursor) : nothing(choice, cursor));
    before = now;
    older.hidden = !next;
    if (next) older.href = `${choice ? home : "#/older"}/${next}`;
    notice.replaceChildren();
    await showIfNoWorker(workers, jobs.some((job) => job.state === "queued"), signal);
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

const choices = (choice) => h("nav", { class: "buttons", "aria-label": "Which jobs" }, Object.entries(CHOICES).map(
  ([name, [words]]) => h("a", { href: name ? `#/state/${name}` : "#/", "aria-current": name === choice ? "page" : null }, words)));

const nothing = (choice, cursor) => (choice || cursor ? h("p", {}, cursor ? "There are no older jobs." : "There are no such jobs.")
  : h("p", {}, "There are no jobs yet. ", h("a", { href: "#/new" }, "Start a search.")));

function rows(jobs, cursor) {
  return table(cursor ? "Older jobs, newest first" : "The latest jobs, newest first", [["model"], ["cluster"], ["state"], ["progress"], ["step", true], ["submitted"]],
    jobs.map((job) => [
      h("a", { href: `#/jobs/${job.id}`, title: model(job) }, model(job)),
      place(job.request),
      state(job.state),
      bar(job),
      seconds(job.step_time_s ?? job.progress?.best_step_time_s),
      new Date(1000 * job.created_at).toLocaleString(),
    ]));
}
