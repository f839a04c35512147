// The search as a picture: the best step time of every searcher over time, and the bound below which no plan can be.

import { seconds } from "./dom.js";

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 900, HEIGHT = 320, LEFT = 64, RIGHT = 12, TOP = 12, BOTTOM = 34;
// Of Okabe and Ito: without yellow, which cannot be seen on white, and with a darker sky blue and orange, so that each
// line has 3:1 on the ground of either scheme. The dashes tell them apart without colour.
const LOOKS = [["#0072b2", ""], ["#d55e00", "8 3"], ["#009e73", "3 3"], ["#cc79a7", "10 3 2 3"], ["#3c9cd4", "1 3"],
  ["#bd8300", "14 4"], ["#888888", "5 2 1 2"]];

/** The colour and the dashes of searcher number `index`: further ones than there are colours have other dashes. */
function lookOf(index) {
  const round = Math.floor(index / LOOKS.length);
  return [LOOKS[index % LOOKS.length][0], LOOKS[(index + round) % LOOKS.length][1]];
}

function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** What a search has told: points [seconds, step time] of each searcher. */
export class Course {
  constructor() {
    this.members = new Map();
    this.latest = null;
  }

  get hasPlan() {
    return [...this.members.values()].some((member) => member.points.length > 0);
  }

  add(progress) {
    if (this.latest && progress.attempt !== this.latest.attempt) this.members.clear();
    this.latest = progress;
    for (const [name, member] of Object.entries(progress.members ?? {})) {
      if (!this.members.has(name)) {
        this.members.set(name, { look: lookOf(this.members.size), points: [], evaluations: 0 });
      }
      const own = this.members.get(name);
      own.evaluations = member.evaluations;
      const best = member.best_step_time_s;
      const before = own.points.at(-1)?.[1];
      if (best !== null && best !== before) own.points.push([progress.seconds, best]);
    }
  }
}

export function swatch([colour, dashes]) {
  const line = svg("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: colour, "stroke-width": 3, "stroke-dasharray": dashes });
  return svg("svg", { class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true" }, line);
}

/** The picture of a search in which some searcher has found a plan that fits. */
export function chart(course) {
  const { latest } = course;
  const times = [...course.members.values()].flatMap((member) => member.points.map(([, best]) => best));
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const best = Math.min(...times);
  const bound = latest.lower_bound_s || best;
  picture.setAttribute("aria-label",
    `Best step time of each searcher over ${seconds(latest.seconds)}; the best is ${seconds(best)}.`);
  const low = 0.97 * Math.min(bound, best);
  // What is far above the best found so far would press all else together.
  const high = 1.05 * Math.min(Math.max(...times, bound), 6 * Math.min(best, 1e300));
  const until = Math.max(latest.seconds, 1e-3);
  const x = (s) => LEFT + (WIDTH - LEFT - RIGHT) * Math.min(s / until, 1);
  const y = (s) => TOP + (HEIGHT - TOP - BOTTOM) * Math.min(Math.max(Math.log(high / s) / Math.log(high / low), 0), 1);
  for (let i = 0; i <= 4; i++) {
    const step = high * (low / high) ** (i / 4);
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(step), y2: y(step) }));
    const label = svg("text", { x: LEFT - 6, y: y(step) + 4, "text-anchor": "end" });
    label.textContent = seconds(step);
    const at = svg("text", { x: x((until * i) / 4), y: HEIGHT - 12, "text-anchor": i === 4 ? "end" : "middle" });
    at.textContent = i ? seconds((until * i) / 4) : "0 s";
    picture.append(label, at);
  }
  picture.append(svg("line", { class: "bound", x1: LEFT, x2: WIDTH - RIGHT, y1: y(bound), y2: y(bound) }));
  const label = svg("text", { x: WIDTH - RIGHT, y: y(bound) - 5, "text-anchor": "end" });
  label.textContent = `no plan takes less than ${seconds(bound)}`;
  picture.append(label);
  for (const { look: [colour, dashes], points } of course.members.values()) {
    if (!points.length) continue;
    let path = `M${x(points[0][0])} ${y(points[0][1])}`;
    for (const [at, step] of points.slice(1)) path += `H${x(at)}V${y(step)}`;
    picture.append(svg("path", { d: `${path}H${x(until)}`, stroke: colour, "stroke-dasharray": dashes }));
  }
  return picture;
}
