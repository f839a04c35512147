// The pages of the dashboard, each behind an address of its own.

import { askForKey, get, isAway, sleep } from "./api.js";
import { h } from "./dom.js";
import { showForm } from "./form.js";
import { showJob } from "./job.js";
import { showJobs } from "./jobs.js";

const AGAIN_MS = 2000;
const main = document.getElementById("main");
let leaving = new AbortController();

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const [, page, id, more] = location.hash.split("/");
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href") === `#/${page ?? ""}`;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const root = h("div", { class: "awaited" });
  main.replaceChildren(root);
  try {
    if (page === "jobs" && id) await showJob(root, id, signal);
    else if (page === "new") await showForm(root, signal);
    else if (page === "state") await showJobs(root, id, more ?? "", signal);
    else await showJobs(root, "", page === "older" ? id : "", signal);
  } catch (fault) {
    if (signal.aborted) return;
    for (const awaited of root.querySelectorAll(".awaited")) awaited.classList.remove("awaited");
    if (!root.querySelector("h1")) root.append(h("h1", {}, "This page cannot be shown"));
    const more = isAway(fault) ? " The page tries again every two seconds." : "";
    root.append(h("p", { class: "fault", role: "alert" }, `${fault.message}${more}`));
    if (isAway(fault)) await again(signal);
  }
}

/** Shows the page anew as soon as the service is there. */
async function again(signal) {
  let answers = false;
  while (!answers) {
    await sleep(AGAIN_MS);
    if (signal.aborted) return;
    answers = await get("readyz", signal).then(() => true, () => false);
  }
  if (!signal.aborted) show();
}

document.getElementById("key-button").addEventListener("click", async () => {
  if (await askForKey()) show();
});
// The address behind # names a page, so the link past the head of the page must not change it.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => {
  show();
  main.focus();
});
show();
