// Elements, numbers in words, and files to keep. Texts are always set as text, never as markup.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A table. Columns: [title, isNumber]; rows: cells, the first one names its row. */
export function table(caption, columns, rows) {
  const kind = (number) => (columns[number][1] ? "number" : null);
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, columns.map(([title], i) => h("th", { scope: "col", class: kind(i) }, title)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) =>
        i === 0 ? h("th", { scope: "row", class: kind(i) }, cell) : h("td", { class: kind(i) }, cell)))))));
}

const REACHED = "a[href], button, [tabindex]";

/** Shows other content in a place that changes by itself. What has the focus, and how far tables are moved to the side,
 * stays as it is: a link is found again by its address, all else by its number. */
export function renew(root, ...children) {
  const held = root.contains(document.activeElement) ? document.activeElement : null;
  const number = [...root.querySelectorAll(REACHED)].indexOf(held);
  const moved = [...root.querySelectorAll(".wide")].map((wide) => wide.scrollLeft);
  root.replaceChildren(...children);
  root.querySelectorAll(".wide").forEach((wide, i) => { wide.scrollLeft = moved[i] ?? 0; });
  if (!held) return;
  const reached = [...root.querySelectorAll(REACHED)], href = held.getAttribute("href");
  (href ? reached.find((one) => one.getAttribute("href") === href) : reached[number])?.focus({ preventScroll: true });
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, scale] of [["µs", 1e6], ["ms", 1e3]]) {
    if (value * scale < 999.5) return `${Number((value * scale).toPrecision(3))} ${unit}`;
  }
  return `${Number(value.toPrecision(3)).toLocaleString("en")} s`;
}

export const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
export const gib = (bytes) => (bytes / 2 ** 30).toFixed(2);
export const share = (value) => `${(100 * value).toFixed(1)} %`;

/** Says something to those who cannot see the page. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** Hands a file to the user. */
export function keep(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
