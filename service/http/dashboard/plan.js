// A plan: in words, in pictures, in figures, beside others, and as files.

import { get, text } from "./api.js";
import { announce, count, gib, h, keep, seconds, share, table } from "./dom.js";
import { model, place } from "./jobs.js";

const CLASSES = ["parameters", "gradients", "optimizer", "activations", "buffers"];
const BASELINES = { dp: "pure data parallelism", expert: "the best template", yours: "your plan" };
const PICTURES = [["What happens when", ["timeline", "memory-over-time"]], ["Where the time goes", ["breakdown"]],
  ["Where the memory goes", ["memory"]], ["The model on the devices", ["placement"]],
  ["How it was found", ["search"]]];

export async function showPlan(root, job, signal) {
  const here = `v1/jobs/${job.id}`;
  const plan = await get(`${here}/plan`, signal);
  const shown = PICTURES.filter(([, names]) => !names.includes("search") || Object.keys(plan.search?.history ?? {}).length);
  const words = h("div"), pictures = new Map(shown.map(([title]) => [title, h("div")]));
  const { estimate } = plan;
  root.append(h("h2", { id: "plan" }, `Plan: ${seconds(estimate.step_time_s)} a step`), words,
    ...(plan.why.length ? [h("h3", {}, "Why"), h("ul", {}, plan.why.map((line) => h("li", {}, line)))] : []),
    ...(plan.warnings.length ? [h("h3", {}, "Warnings"), h("ul", {}, plan.warnings.map((line) => h("li", {}, line)))] : []));
  for (const [title] of shown) {
    root.append(h("h2", {}, title), pictures.get(title));
    if (title === "Where the time goes") root.append(times(estimate));
    if (title === "Where the memory goes") root.append(memory(estimate));
  }
  const drawn = draw(words, pictures, shown, here, signal).catch((fault) => {
    if (!signal.aborted) words.replaceChildren(h("p", { class: "fault" }, `No pictures: ${fault.message}`));
  });
  const [compared, kept] = await Promise.all([comparison(plan, job, signal), files(plan, job, signal)]);
  root.append(h("h2", {}, "Compared with others"), baselines(plan), compared, h("h2", {}, "Files"), kept);
  announce("The plan is shown.");
  await drawn;
}

async function draw(words, pictures, shown, here, signal) {
  words.replaceChildren(h("p", { class: "quiet" }, "The pictures are being drawn …"));
  const drawn = await get(`${here}/pictures`, signal);
  words.replaceChildren(h("table", {}, h("tbody", {}, drawn.lines.map(([label, line]) =>
    h("tr", {}, label ? h("th", { scope: "row" }, label) : h("td"), h("td", {}, line))))));
  for (const [title, names] of shown) {
    pictures.get(title).replaceChildren(...names.map((name) => h("figure", { id: name, tabindex: "0" },
      h("img", { src: `data:image/svg+xml,${encodeURIComponent(drawn.pictures[name].svg)}`, alt: drawn.pictures[name].about }))));
  }
}

function times({ breakdown_s: all, step_time_s: step }) {
  const parts = Object.entries({ ...all, exposed_communication: null, ...Object.fromEntries(
    Object.entries(all.exposed_communication ?? {}).map(([name, s]) => [`exposed ${name.replaceAll("_", "-")}`, s])) });
  return table("Time of the busiest rank", [["part"], ["time", true], ["share", true]],
    parts.filter(([, s]) => typeof s === "number").map(([name, s]) => [name, seconds(s), share(s / step)]));
}

function memory({ memory_bytes: rows }) {
  const all = (row) => CLASSES.reduce((sum, name) => sum + row[name], 0);
  return table("Memory in GiB at the peak", [["devices"], ...CLASSES.map((name) => [name, true]), ["total", true], ["capacity", true]],
    rows.map((row) => [row.devices, ...CLASSES.map((name) => gib(row[name])), gib(all(row)), gib(row.capacity)]));
}

function baselines({ estimate, search }) {
  const rows = Object.entries(search?.baselines ?? {}).map(([name, s]) =>
    [BASELINES[name] ?? name, s === null ? "does not fit" : seconds(s), s === null ? "–" : `${(s / estimate.step_time_s).toFixed(2)} ×`]);
  return table("Step times of this plan and of others", [["plan"], ["step", true], ["relative to this plan", true]],
    [["this plan", seconds(estimate.step_time_s), "1.00 ×"], ...rows]);
}

const FIGURES = [
  ["step", ({ estimate }) => seconds(estimate.step_time_s)],
  ["samples a second", ({ estimate }) => count(estimate.samples_per_s)],
  ["share of the peak FLOP/s", ({ estimate }) => share(estimate.mfu)],
  ["fullest device", ({ estimate }) => share(Math.max(...estimate.memory_bytes.map(
    (row) => CLASSES.reduce((sum, name) => sum + row[name], 0) / row.capacity)))],
  ["stages", ({ stages }) => String(stages.length)],
  ["mesh of the first stage", ({ stages }) => stages[0].mesh.map(([axis, size]) => `${axis} ${size}`).join(" × ") || "one device"],
  ["micro-batches", (plan) => `${plan.num_micro_batches} of ${plan.samples_per_micro_batch}`],
  ["ZeRO", ({ stages }) => [...new Set(stages.map((stage) => stage.zero.stage))].join(", ")],
  ["recomputed", ({ stages }) => (stages.some((stage) => stage.recompute.length) ? "yes" : "no")],
  ["found by", ({ search }) => search?.found_by ?? "–"],
];

async function comparison(plan, job, signal) {
  const { jobs } = await get("v1/jobs?limit=100&state=succeeded", signal);
  const others = jobs.filter((other) => other.id !== job.id && !other.request?.gnn);
  if (!others.length) return h("p", { class: "quiet" }, "There is no other job to compare with.");
  const shown = h("div");
  const choose = h("select", { id: "other", onchange: compare }, h("option", { value: "" }, "choose a job"),
    others.map((other) => h("option", { value: other.id }, `${model(other)} on ${place(other.request)}, ${other.id.slice(0, 8)}`)));
  async function compare() {
    shown.replaceChildren();
    if (!choose.value) return;
    const other = await get(`v1/jobs/${choose.value}/plan`, signal);
    shown.replaceChildren(table("Two plans", [["figure"], ["this plan"], ["the other"]],
      FIGURES.map(([name, of]) => [name, of(plan), of(other)])));
  }
  return h("div", {}, h("div", { class: "field" }, h("label", { for: "other" }, "Compare with another job"), choose), shown);
}

async function files(plan, job, signal) {
  const { targets } = await get("v1/targets", signal);
  const here = `v1/jobs/${job.id}`;
  const name = plan.model.name.replace(/[^\w.-]+/g, "-");
  const shown = h("div", { "aria-live": "polite" });
  const target = h("select", { id: "export-target" }, Object.keys(targets).map((one) => h("option", { value: one }, one)));
  if (plan.training.target in targets) target.value = plan.training.target;
  const button = (label, action) => h("button", { type: "button", onclick: () => attempt(action) }, label);
  async function attempt(action) {
    shown.replaceChildren();
    try {
      await action();
    } catch (fault) {
      shown.replaceChildren(h("p", { class: "fault" }, fault.message));
    }
  }
  async function exported() {
    const found = await get(`${here}/exports/${target.value}`, signal);
    shown.replaceChildren(h("p", {}, "Launch: ", h("code", {}, found.launch)), h("p", { class: "buttons" },
      Object.entries(found.files).map(([file, content]) =>
        h("button", { type: "button", onclick: () => keep(file, content, "text/plain") }, `Download ${file}`))));
  }
  return h("div", {},
    h("p", { class: "buttons" },
      button("Download plan.json", () => keep(`${name}.plan.json`, JSON.stringify(plan, null, 1), "application/json")),
      button("Download the report", async () => keep(`${name}.html`, await text(`${here}/report`, signal), "text/html"))),
    h("div", { class: "field" }, h("label", { for: "export-target" }, "Configuration of a trainer"), target),
    h("p", {}, button("Export", exported)), shown);
}
