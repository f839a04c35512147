// A job: its search as it goes on, and its plan.

import { events, get, post, sleep } from "./api.js";
import { Course, chart, swatch } from "./chart.js";
import { announce, count, h, keep, renew, seconds, share, table } from "./dom.js";
import { showGnnPlan } from "./gnn.js";
import { AGAIN_MS, bar, model, place, showIfNoWorker, state } from "./jobs.js";
import { showPlan } from "./plan.js";

export async function showJob(root, id, signal) {
  let job = await get(`v1/jobs/${encodeURIComponent(id)}`, signal);
  document.title = `${model(job)} · AutoMAP`;
  const head = h("div"), notice = h("div", { role: "status" }), workers = h("div", { role: "status" });
  const search = h("section", { "aria-label": "Search" }), plan = h("div");
  root.append(h("h1", {}, `${model(job)} on ${place(job.request)}`), head, notice, workers, search, plan);
  const course = new Course();
  if (job.progress) course.add({ attempt: job.attempt, ...job.progress });
  showHead();
  lookForWorkers();

  /** As long as the job waits. */
  async function lookForWorkers() {
    while (job.state === "queued" && !signal.aborted) {
      if (!document.hidden) await showIfNoWorker(workers, true, signal);
      await sleep(AGAIN_MS);
    }
    workers.replaceChildren();
  }

  function showHead() {
    if (job.state !== "queued") workers.replaceChildren();
    const active = ["queued", "running"].includes(job.state);
    const cancel = h("button", { type: "button", onclick: stop }, "Cancel the job");
    const facts = [h("p", {}, asked(job.request)), h("p", {}, state(job.state), " ", bar(job, course.latest), " ",
      h("span", { class: "quiet" }, `job ${job.id}${job.attempt > 1 ? `, run ${job.attempt}` : ""}`))];
    if (active) facts.push(h("p", {}, cancel));
    if (job.problem) facts.push(h("div", { class: "fault" }, h("strong", {}, job.problem.title), h("div", {}, job.problem.detail)));
    renew(head, ...facts);
  }

  async function stop(event) {
    event.target.disabled = true;
    try {
      job = await post(`v1/jobs/${job.id}/cancel`, {});
      showHead();
      document.getElementById("main").focus(); // the button that had the focus is gone
    } catch (fault) {
      event.target.disabled = false;
      head.append(h("p", { class: "fault", role: "alert" }, fault.message));
    }
  }

  function showSearch() {
    const { latest } = course;
    if (!latest) return;
    const bound = latest.lower_bound_s;
    const rows = [...course.members].map(([name, member]) => {
      const best = member.points.at(-1)?.[1];
      return [h("span", { class: "member" }, swatch(member.look), name), count(member.evaluations), seconds(best),
        best && bound ? `+${share(best / bound - 1)}` : "–"];
    });
    renew(search,
      h("h2", {}, "Search"),
      h("p", {}, `${latest.searcher}: ${count(latest.evaluations)} plans in ${seconds(latest.seconds)}, `,
        latest.best_step_time_s === null ? `none fits${["queued", "running"].includes(job.state) ? " yet" : ""}` : `the best ${seconds(latest.best_step_time_s)} a step`,
        bound ? `; no plan takes less than ${seconds(bound)}.` : "."),
      course.hasPlan ? h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "The search over time" }, chart(course)) : "",
      rows.length ? table("Searchers", [["searcher"], ["plans", true], ["best step", true], ["above the bound", true]], rows) : "");
  }

  showSearch();
  // The events come from the beginning: what the record says of the search stands at their end, not in front of them.
  let due = null, isRecord = true;
  const known = Math.max(job.created_at, job.started_at ?? 0, job.finished_at ?? 0);
  const tell = (fault) => notice.replaceChildren(
    ...(fault ? [h("p", { class: "fault" }, `${fault.message} The page tries again until it does.`)] : []));
  for await (const event of events(job.id, signal, tell)) {
    if (event.kind === "progress") {
      if (isRecord) course.members.clear();
      isRecord = false;
      course.add(event.data);
      due ??= requestAnimationFrame(() => {
        due = null;
        showSearch();
        head.querySelector("progress")?.replaceWith(bar(job, course.latest));
      });
    } else if (event.data.at > known && (event.data.state !== job.state || event.data.attempt !== job.attempt)) {
      job = { ...job, state: event.data.state, attempt: event.data.attempt, problem: event.data.problem ?? null };
      announce(`The job is ${job.state}.`);
      showHead();
    }
  }
  if (signal.aborted) return;
  job = await get(`v1/jobs/${job.id}`, signal);
  if (job.progress) course.add({ attempt: job.attempt, ...job.progress });
  showHead();
  showSearch();
  if (job.state === "succeeded") await (job.request?.gnn ? showGnnPlan : showPlan)(plan, job, signal);
  else plan.replaceChildren(soFar(job));
}

/** The settings of a request, by which jobs for the same model and cluster are told apart. */
function asked(request) {
  const training = request?.training ?? {};
  return [
    training.global_batch ? `${count(training.global_batch)} samples a step` : null,
    training.precision ? `precision ${training.precision}` : null,
    training.target && training.target !== "any" ? `for ${training.target}` : null,
    request?.budget ? `budget ${/^\d+$/.test(request.budget) ? `${request.budget} plans` : request.budget}` : null,
  ].filter((part) => part !== null).join(", ");
}

/** What a search that failed or was cancelled had found by then. */
function soFar(job) {
  const best = job.progress?.best_step_time_s;
  if (!best) return h("p", {}, job.progress ? "The search had found no plan that fits." : "The search had not begun.");
  const shown = h("div", { role: "alert" });
  async function download() {
    shown.replaceChildren();
    try {
      const found = await get(`v1/jobs/${job.id}/plan?best=so-far`);
      keep("plan.json", JSON.stringify(found, null, 1), "application/json");
    } catch (fault) {
      shown.replaceChildren(h("p", { class: "fault" }, fault.message));
    }
  }
  return h("div", {}, h("h2", {}, "Plan"),
    h("p", {}, `The search did not end by itself. Its best plan until then takes ${seconds(best)} a step.`),
    h("p", {}, h("button", { type: "button", onclick: download }, "Download the best plan so far")), shown);
}
