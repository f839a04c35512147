// The form that starts a search, for a known model or a file.

import { get, post } from "./api.js";
import { h } from "./dom.js";

function field(id, label, input, note) {
  input.id = id;
  if (note) input.setAttribute("aria-describedby", `${id}-note`);
  return h("div", { class: "field" }, h("label", { for: id }, label), input,
    note ? h("div", { id: `${id}-note`, class: "quiet" }, note) : null);
}

const choice = (values) => h("select", {}, values.map(([value, text]) => h("option", { value }, text)));
/** The texts of a field that takes several. */
const texts = (input) => input.value.split(",").map((text) => text.trim()).filter(Boolean);

/** Texts such as seq=1024 as an object; upload has refused others before. */
const pairs = (input) => Object.fromEntries(texts(input).map((text) => {
  const at = text.lastIndexOf("=");
  return [text.slice(0, at), text.endsWith("=none") ? null : Number(text.slice(at + 1))];
}));

const listed = (id, values) => h("datalist", { id }, values.map((value) => h("option", { value })));

export async function showForm(root, signal) {
  document.title = "New search · AutoMAP";
  const [clusters, { models }, { targets }] = await Promise.all(
    ["v1/clusters", "v1/zoo", "v1/targets"].map((path) => get(path, signal)));
  const zoo = h("input", { list: "zoo-names", value: "gpt2-xl", required: true, spellcheck: "false" });
  const file = h("input", { type: "file", accept: ".onnx" });
  const dims = h("input", { spellcheck: "false" });
  const batchDims = h("input", { spellcheck: "false" });
  const parts = {
    zoo: field("zoo", "Name of the model", zoo, "With sizes, if they differ: gpt2:seq_len=512."),
    file: h("div", {},
      field("file", "ONNX file", file, "Weights are not needed: automap strip removes them."),
      field("dims", "Sizes of symbolic dims", dims, "Such as seq=1024, width=768. The batch needs no size."),
      field("batch_dims", "Batch dims", batchDims, "For inputs whose first dim is not the batch, such as tokens=1, or mask=none for one without a batch.")),
  };
  const kind = (value, text) => h("label", {},
    h("input", { type: "radio", name: "source", value, checked: value === "zoo", onchange: () => choose(value) }), ` ${text} `);
  function choose(value) {
    parts.zoo.hidden = value !== "zoo";
    parts.file.hidden = value !== "file";
    zoo.required = value === "zoo";
    file.required = value === "file";
  }
  const cluster = h("input", { list: "cluster-names", value: "4x8xA100-80GB", required: true, spellcheck: "false" });
  const batch = h("input", { type: "number", min: "1", value: "512", required: true });
  const precision = choice([["", "default: bf16, or fp16 or fp32 on devices without it"], ["bf16", "bf16"], ["fp16", "fp16"], ["fp32", "fp32"]]);
  const target = choice([["", "any trainer"], ...Object.keys(targets).map((name) => [name, name])]);
  const budget = h("input", { value: "30s", required: true, spellcheck: "false" });
  const workers = h("input", { type: "number", min: "1", max: "64", value: "1", required: true });
  const fault = h("div", { role: "alert" });
  const button = h("button", {}, "Search");
  const once = { body: "", key: "" }, doing = h("span", { role: "status", class: "quiet" });
  const form = h("form", { novalidate: false, onsubmit: submit },
    h("fieldset", {}, h("legend", {}, "Model"), h("p", {}, kind("zoo", "a known model"), kind("file", "a file")), parts.zoo, parts.file),
    field("cluster", "Cluster", cluster, `${clusters.form}, as in 2x8xV100-16GB@25Gbit, or the text of a cluster file.`),
    field("global_batch", "Global batch", batch, "Samples of one optimizer step, over all devices."),
    field("precision", "Precision", precision),
    field("target", "Trainer", target, "Only plans that this trainer can run are searched."),
    field("budget", "Budget", budget, "A time, as in 30s or 2m, or a number of plans."),
    field("workers", "Workers", workers, "Number of workers that search at the same time; more than one needs a budget in time."),
    listed("zoo-names", models), listed("cluster-names", clusters.presets), fault, h("p", {}, button, " ", doing));
  root.append(h("h1", {}, "New search"), form);
  choose("zoo");

  async function submit(event) {
    event.preventDefault();
    fault.replaceChildren();
    for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
    button.disabled = true;
    try {
      const training = { global_batch: Number(batch.value) };
      if (precision.value) training.precision = precision.value;
      if (target.value) training.target = target.value;
      const body = { cluster: clusterOf(cluster.value), training, budget: budget.value, workers: Number(workers.value) };
      if (file.required) {
        const said = new URLSearchParams({ name: file.files[0].name.replace(/\.onnx$/, "") });
        for (const text of texts(dims)) said.append("dim", text);
        for (const text of texts(batchDims)) said.append("batch_dim", text);
        doing.textContent = "The file is sent and read …";
        const uploaded = await post(`v1/models?${said}`, file.files[0], { "Content-Type": "application/octet-stream" });
        Object.assign(body, { model_id: uploaded.id, dims: pairs(dims), batch_dims: pairs(batchDims) });
      } else body.zoo = zoo.value;
      doing.textContent = "The search is checked …";
      // The same request has the same key: where only its answer was lost, sending it again makes no second job.
      if (once.body !== JSON.stringify(body)) Object.assign(once, { body: JSON.stringify(body), key: key() });
      const job = await post("v1/jobs", body, { "Idempotency-Key": once.key });
      location.hash = `#/jobs/${job.id}`;
    } catch (wrong) {
      const told = wrong.document ?? { title: wrong.message };
      // The outermost part of a path that has a field: what follows it may be any name, such as that of a dim.
      const input = (told.field ?? "").split(/[.[]/).filter(Boolean)
        .map((name) => form.querySelector(`#${CSS.escape(NAMES[name]?.(file.required) ?? name)}`))
        .find(Boolean);
      const title = wrong.message.startsWith(told.title) ? null : h("strong", {}, told.title);
      fault.replaceChildren(h("div", { class: "fault" }, title, h("div", {}, wrong.message)));
      if (input) {
        input.setAttribute("aria-invalid", "true");
        input.focus();
      }
    } finally {
      button.disabled = false;
      doing.textContent = "";
    }
  }
}

/** Fields of problems that the form has under another name. */
const NAMES = { model: (isFile) => (isFile ? "file" : "zoo"), body: (isFile) => (isFile ? "file" : undefined) };

/** A cluster as it is sent: the text of a form such as 8xH100 as it is, that of a file as its document. */
function clusterOf(text) {
  if (!text.trim().startsWith("{")) return text;
  try {
    return JSON.parse(text);
  } catch (wrong) {
    const title = "The cluster cannot be read as JSON";
    throw Object.assign(new Error(`${title}: ${wrong.message}`), { document: { title, field: "cluster" } });
  }
}

// crypto.randomUUID is there on secure origins alone, and a service inside a company is often reached by http.
function key() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
