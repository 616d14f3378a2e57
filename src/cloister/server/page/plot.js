// A small plot of values over time as SVG. Its name says in words what it shows.

import { svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 72;
const GRID = [0, 0.25, 0.5, 0.75];

/** Lines over time, the newest at the right. */
export class Plot {
  /**
   * @param top what the axis reaches at least.
   * @param unit what the axis counts in: its top is a round number of them.
   */
  constructor(top, unit = 1) {
    this.top = top;
    this.unit = unit;
    this.element = svg("svg", { class: "plot", role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
  }

  /**
   * Draws points and returns the top of the axis, which no line exceeds.
   * @param points each with `at`, from 0 (left) to 1, and `values`, one for each line, null where there is none; `isGap` parts
   *   it from the point before.
   */
  draw(points, label) {
    const known = points.flatMap(({ values }) => values).filter((value) => value !== null);
    const top = ceiling(Math.max(this.top, ...known) / this.unit) * this.unit;
    const grid = GRID.map((part) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: part * HEIGHT, y2: part * HEIGHT }));
    const lines = points.length ? points[0].values.flatMap((_, i) => paths(points, i, top)) : [];
    this.element.replaceChildren(...grid, ...lines);
    this.element.setAttribute("aria-label", label);
    return top;
  }
}

function paths(points, i, top) {
  return runs(points, i).flatMap((run) => {
    const places = run.map(({ at, values }) => [at * WIDTH, HEIGHT - 1 - (values[i] / top) * (HEIGHT - 2)].map((place) => place.toFixed(1)));
    const drawn = `M${places.map((place) => place.join(" ")).join("L")}`;
    const line = svg("path", { class: `line line-${i}`, d: places.length === 1 ? `${drawn}h1` : drawn });
    if (i > 0) return [line];
    return [svg("path", { class: "area", d: `${drawn}L${places.at(-1)[0]} ${HEIGHT}L${places[0][0]} ${HEIGHT}Z` }), line];
  });
}

/** The parts of a line without gaps. */
function runs(points, i) {
  const found = [[]];
  for (const point of points) {
    if (found.at(-1).length && (point.isGap || point.values[i] === null)) found.push([]);
    if (point.values[i] !== null) found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}

/** The next round number: 1, 2 or 5 times a power of ten. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value);
}
