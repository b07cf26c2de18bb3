// One chart: a figure with a caption, a legend whose figures are those under the pointer or the
// latest, and a plot by uPlot (static/vendor/), which is a picture with its figures as its label.

import {element, setClass, setText} from "./dom.js";
import {clock, number} from "./text.js";

const HEIGHT = 170;
const NUM_COLORS = 8;
const FONT = "11px system-ui, sans-serif";

const color = (style, index) => style.getPropertyValue(`--line-${index % NUM_COLORS}`).trim();

export class Chart {
  constructor({title, format, range, fromZero = false}) {
    this.title = title;
    this.format = format;
    this.range = range ?? (fromZero ? upFromZero : around);
    this.figure = element("figure", "chart");
    const caption = element("figcaption");
    this.when = element("span", "at");
    caption.append(element("h3", "", title), this.when);
    this.legend = element("ul", "legend");
    this.place = element("div", "plot");
    this.place.setAttribute("role", "img");
    this.figure.append(caption, this.legend, this.place);
    new ResizeObserver(() => this.fit()).observe(this.place);
  }

  draw(data) {
    this.data = data;
    const shape = JSON.stringify([data.isTime, data.lines.map(({ys, ...line}) => line), !data.xs.length]);
    const columns = [data.xs, ...data.lines.map(line => line.ys)];
    if (shape === this.shape) {
      this.plot?.setData(columns);
    } else {
      this.shape = shape;
      this.rebuild(columns);
    }
    this.drawLegend(null);
    this.place.setAttribute("aria-label", this.describe());
  }

  // Also when the colours change.
  rebuild(columns = [this.data.xs, ...this.data.lines.map(line => line.ys)]) {
    this.plot?.destroy();
    this.plot = null;
    this.place.replaceChildren();
    this.legend.replaceChildren(...this.data.lines.map(line => makeEntry(line)));
    if (!this.data.xs.length || !this.data.lines.length) {
      this.place.append(element("span", "empty", "nothing yet"));
      return;
    }
    this.plot = new uPlot(this.options(), columns, this.place);
  }

  recolor() {
    if (!this.data) return;
    this.rebuild();
    this.drawLegend(null);
  }

  fit() {
    if (this.plot && this.place.clientWidth) {
      this.plot.setSize({width: this.place.clientWidth, height: HEIGHT});
    }
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const {isTime, lines} = this.data;
    return {
      width: this.place.clientWidth || 320,
      height: HEIGHT,
      padding: [8, 22, 0, 0],  // room for half a label at the right end
      legend: {show: false},
      cursor: {y: false, drag: {x: false, y: false}, sync: isTime ? {key: "time"} : undefined},
      scales: {x: {time: isTime, range: withWidth}, y: {range: this.range}},
      axes: axes(style, isTime, this.format),
      series: [{}, ...lines.map(line => series(style, line))],
      hooks: {setCursor: [plot => this.drawLegend(plot.cursor.idx)]},
    };
  }

  drawLegend(index) {
    const {xs, lines, isTime} = this.data;
    const isPast = index != null && index < xs.length;
    lines.forEach((line, number_) => {
      const value = isPast ? line.ys[index] : latest(line.ys, isTime);
      setText(this.legend.children[number_].lastElementChild, this.say(value));
    });
    const x = isPast ? xs[index] : xs.at(-1);
    const where = x == null ? "" : isTime ? clock(x) : `step ${number(x)}`;
    setText(this.when, where);
  }

  say(value) {
    return value == null ? "-" : this.format(value);
  }

  describe() {
    const {xs, lines, isTime} = this.data;
    if (!xs.length || !lines.length) return `${this.title}: nothing yet`;
    const figures = lines.map(line => `${line.label} ${this.say(latest(line.ys, isTime))}`);
    const over = isTime ? "time" : "step";
    return `${this.title} over ${over}; latest: ${figures.join(", ")}`;
  }
}

// Of a line over time that has ended there is nothing at this moment.
function latest(ys, isTime) {
  return isTime ? ys.at(-1) : ys.findLast(value => value != null);
}

function makeEntry(line) {
  const entry = element("li");
  const swatch = element("span");
  setClass(swatch, line.isPoints ? "swatch points" : isDashed(line) ? "swatch dashed" : "swatch");
  swatch.style.borderColor = `var(--line-${line.color % NUM_COLORS})`;
  entry.append(swatch, element("span", "quiet", line.label), element("span"));
  return entry;
}

const isDashed = line => line.isDashed || line.color >= NUM_COLORS;

function series(style, line) {
  const stroke = color(style, line.color);
  const common = {label: line.label, stroke, width: 1.6, spanGaps: false};
  if (line.isPoints) return {...common, paths: () => null, points: {show: true, size: 6, fill: stroke}};
  // An undefined value is another line's step and no gap; null is one.
  return {...common, dash: isDashed(line) ? [5, 3] : undefined, points: {size: 4, fill: stroke}};
}

function axes(style, isTime, format) {
  const stroke = style.getPropertyValue("--quiet").trim();
  const line = {stroke: style.getPropertyValue("--line").trim(), width: 1};
  const common = {stroke, font: FONT, grid: line, ticks: {...line, size: 4}, gap: 4};
  const sayX = (plot, splits) => splits.map(value => isTime
    ? clock(value, plot.scales.x.max - plot.scales.x.min)
    : Number.isInteger(value) ? number(value) : "");
  const sayY = (plot, splits) => splits.map(value => format(value, true));
  return [
    {...common, size: 26, space: 70, values: sayX},
    {...common, size: 46, space: 32, values: sayY},
  ];
}

// A single sample has a moment around it, or the axis would have no ticks.
function withWidth(plot, least, most) {
  return least === most ? [least - 1, most + 1] : [least, most];
}

function upFromZero(plot, least, most) {
  return [0, most > 0 ? most * 1.08 : 1];
}

function around(plot, least, most) {
  if (least == null || most == null) return [0, 1];
  const margin = (most - least) * 0.08 || Math.abs(most) * 0.1 || 1;
  return [least - margin, most + margin];
}
