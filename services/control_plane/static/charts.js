// The charts, and the two choices of what they show.

import {Chart} from "./chart.js";
import {at} from "./dom.js";
import * as series from "./series.js";
import {compact, number, share} from "./text.js";

const rate = (value, isTick) => isTick ? compact(value) : number(value);
const length = (value, isTick) => isTick ? compact(value) : number(value, 3);
const lossText = (value, isTick) => isTick ? compact(value) : number(value, 4);

export class Charts {
  constructor(history) {
    this.history = history;
    this.evaluations = [];
    const wholeRange = () => [0, 1];
    this.drawn = [
      [new Chart({title: "Throughput, tokens/s", format: rate, fromZero: true}), series.throughput],
      [new Chart({title: "Ring slots in use", format: share, range: wholeRange}), series.occupancy],
      [new Chart({title: "Time spent waiting", format: share, range: wholeRange}), series.waiting],
      [new Chart({title: "Loss", format: lossText}), series.loss],
      [new Chart({title: "Accepted prefix in training", format: length}), series.acceptedPrefix],
      [new Chart({title: "Acceptance length", format: length}), series.acceptance],
    ];
    at("charts").append(...this.drawn.map(([chart]) => chart.figure));
    for (const input of document.querySelectorAll(".choice input")) {
      input.addEventListener("change", () => this.draw());
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const [chart] of this.drawn) chart.recolor();
    });
  }

  draw() {
    const choice = name => document.querySelector(`input[name=${name}]:checked`).value;
    const samples = series.within(this.history.samples, choice("span"));
    for (const [chart, dataOf] of this.drawn) {
      chart.draw(dataOf(samples, choice("axis"), this.evaluations));
    }
  }
}
