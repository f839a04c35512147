// A plan of distributed GNN training: where its tasks run, and what an iteration takes.

import { get } from "./api.js";
import { announce, count, h, keep, seconds, table } from "./dom.js";

export async function showGnnPlan(root, job, signal) {
  const plan = await get(`v1/jobs/${job.id}/plan`, signal);
  const { estimate, search } = plan;
  root.append(h("h2", { id: "plan" }, `Plan: ${seconds(estimate.iteration_s)} an iteration`),
    h("p", {}, `Between ${seconds(estimate.low_s)} and ${seconds(estimate.high_s)}, with the schedule ${plan.schedule}. `,
      `No order of the flows takes less than ${seconds(estimate.lower_bound_s)} with this placement. `,
      `Found by ${search.searcher} in ${count(search.evaluations)} simulations`,
      search.is_optimal ? ", which compared every placement." : "."),
    ...(plan.why.length ? [h("h3", {}, "Why"), h("ul", {}, plan.why.map((line) => h("li", {}, line)))] : []),
    h("h2", {}, "Where tasks run"), places(plan), h("h2", {}, "Compared with simple rules"), rules(plan),
    h("h2", {}, "Files"), h("p", { class: "buttons" }, h("button", { type: "button",
      onclick: () => keep("gnn-plan.json", JSON.stringify(plan, null, 1), "application/json") }, "Download plan.json")));
  announce("The plan is shown.");
}

function places({ placement }) {
  const machines = new Map();
  for (const [task, machine] of Object.entries(placement)) machines.set(machine, [...(machines.get(machine) ?? []), task]);
  return table("Tasks of each machine", [["machine"], ["tasks"]],
    [...machines].sort(([one], [other]) => one.localeCompare(other, "en", { numeric: true }))
      .map(([machine, tasks]) => [machine, tasks.join(", ")]));
}

function rules({ estimate, against }) {
  const rows = Object.entries(against).map(([name, s]) => [name, seconds(s), `${(s / estimate.iteration_s).toFixed(2)} ×`]);
  return table("Iterations of this plan and of placements by simple rules",
    [["placement, schedule"], ["iteration", true], ["relative to this plan", true]],
    [["this plan", seconds(estimate.iteration_s), "1.00 ×"], ...rows]);
}
