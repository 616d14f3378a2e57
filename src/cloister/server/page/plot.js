// A small plot of the last minutes as SVG. Its name says in words what it shows.

import { svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 72;

/** Lines over time, the newest at the right. */
export class Plot {
  /**
   * @param length how many values fit.
   * @param top what the axis reaches at least.
   */
  constructor(length, top) {
    this.length = length;
    this.top = top;
    this.element = svg("svg", { class: "plot", role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
  }

  /** Draws lists of values, null where there is none. Returns the top of the axis. */
  draw(lines, label) {
    const top = ceiling(Math.max(this.top, ...lines.flat().filter((value) => value !== null)));
    const grid = [0.25, 0.5, 0.75].map((part) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: part * HEIGHT, y2: part * HEIGHT }));
    const paths = lines.flatMap((values, i) => this.paths(values, top, i));
    this.element.replaceChildren(...grid, ...paths);
    this.element.setAttribute("aria-label", label);
    return top;
  }

  paths(values, top, i) {
    const x = (at) => ((this.length - values.length + at) / (this.length - 1)) * WIDTH;
    const y = (value) => HEIGHT - 2 - (value / top) * (HEIGHT - 6);
    return runs(values).flatMap((run) => {
      const points = run.map(([at, value]) => `${x(at).toFixed(1)} ${y(value).toFixed(1)}`);
      const line = svg("path", { class: `line line-${i}`, d: `M${points.join("L")}${points.length === 1 ? "h1" : ""}` });
      if (i > 0) return [line];
      const [first, last] = [x(run[0][0]), x(run.at(-1)[0])].map((value) => value.toFixed(1));
      return [svg("path", { class: "area", d: `M${points.join("L")}L${last} ${HEIGHT}L${first} ${HEIGHT}Z` }), line];
    });
  }
}

/** The parts of a list without gaps, as pairs of place and value. */
function runs(values) {
  const found = [[]];
  values.forEach((value, at) => {
    if (value !== null) found.at(-1).push([at, value]);
    else if (found.at(-1).length) found.push([]);
  });
  return found.filter((run) => run.length);
}

/** The next round number: 1, 2 or 5 times a power of ten. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999);
}
