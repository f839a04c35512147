// The REST API: requests with the user's key, faults as problem documents, events of a job.

const NAME = "automap-key";

/** What a problem document tells. Where its detail says no more than its title, what to do about it stands apart. */
function told({ title, detail, repair }) {
  const text = detail || title || "The service does not answer.";
  return repair && !text.includes(repair) ? `${text.replace(/\.$/, "")}. ${repair}` : text;
}

export class Fault extends Error {
  constructor(document) {
    super(told(document));
    this.document = document;
  }
}

export const keys = {
  get: () => sessionStorage.getItem(NAME) ?? "",
  set: (key) => (key ? sessionStorage.setItem(NAME, key) : sessionStorage.removeItem(NAME)),
};

let asking = null;

/** Asks the user for a key, once at a time, and says why the one before was refused. Resolves to whether one was given. */
export function askForKey(why = "") {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    input.value = keys.get();
    document.getElementById("key-fault").textContent = why;
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "save";
      if (given) keys.set(input.value.trim());
      input.value = "";
      resolve(given);
    }, { once: true });
  });
  return asking;
}

async function send(path, options) {
  const headers = new Headers(options.headers);
  if (keys.get()) headers.set("Authorization", `Bearer ${keys.get()}`);
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new Fault({ title: "No answer", detail: "The service does not answer. Is it running?" });
  }
  if (answer.status === 401) {
    // Without its repair, which tells how to send a header.
    const { detail = "", repair = "" } = keys.get() ? await answer.clone().json().catch(() => ({})) : {};
    const why = detail.replace(repair, "").trim();
    if (await askForKey(why)) return send(path, options);
  }
  if (!answer.ok) {
    throw new Fault(await answer.json().catch(() => ({ title: `Status ${answer.status}` })));
  }
  return answer;
}

export const get = async (path, signal) => (await send(path, { signal })).json();
export const text = async (path, signal) => (await send(path, { signal })).text();
export const post = async (path, body, headers = {}) =>
  (await send(path, body instanceof Blob
    ? { method: "POST", body, headers }
    : { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json", ...headers } })).json();

/** Whether a request failed because the service, or what it needs, is away for now, as at a restart. */
export const isAway = (fault) => fault instanceof Fault && [undefined, 502, 503, 504].includes(fault.document.status);

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/**
 * The events of a job until its end. Not EventSource, which cannot send a key. Where the connection is cut, it goes on
 * behind the last event; meanwhile `tell` gets the fault, and nothing when the service answers again.
 */
export async function* events(job, signal, tell) {
  let last = "";
  let pause = 500;
  while (!signal.aborted) {
    try {
      const answer = await send(`v1/jobs/${job}/events`, { signal, headers: last ? { "Last-Event-ID": last } : {} });
      tell();
      if (answer.status === 204) return;
      for await (const event of read(answer.body)) {
        last = event.id;
        pause = 500;
        yield event;
        if (event.kind === "state" && !["queued", "running"].includes(event.data.state)) return;
      }
    } catch (fault) {
      if (signal.aborted) return;
      const status = fault.document?.status;
      if (status && status < 500) throw fault;
      if (fault instanceof Fault) tell(fault);
      await sleep(pause);
      pause = Math.min(2 * pause, 10_000);
    }
  }
}

async function* read(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = {};
      for (const line of block.split("\n")) {
        const at = line.indexOf(": ");
        if (at > 0) fields[line.slice(0, at)] = line.slice(at + 2);
      }
      if (fields.data) yield { id: fields.id, kind: fields.event, data: JSON.parse(fields.data) };
    }
  }
}
