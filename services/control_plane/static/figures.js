// The head of the page: the run's name and state, its figures of this moment, what holds it back.

import {Keyed, at, element, setChildren, setClass, setText} from "./dom.js";
import {duration, modelName, number, share} from "./text.js";

const STATE_TONES = {running: "good", evaluating: "good", failed: "bad", paused: "warn", draining: "warn"};

// In these the run is to train; one that is paused or done is not ready and needs no reason.
const EXPECTING = new Set(["waiting", "starting", "running"]);

const sum = (items, pick) => items.reduce((total, item) => total + (pick(item) ?? 0), 0);

function usedShare(rings) {
  const total = sum(rings, ring => sum(Object.values(ring.slots), count => count));
  return total ? 1 - sum(rings, ring => ring.slots.free) / total : null;
}

// Distinct ones, of all target servers that the run has had.
function publishedRows(account) {
  return account ? account.published - account.recaptured + account.settled_before : 0;
}

function figuresOf(status) {
  const {groups, target, bottleneck, rings, workers} = status;
  const published = Math.max(0, ...groups.map(group => publishedRows(group.account)));
  const live = sum(groups, group => group.num_live_workers);
  const many = groups.length > 1;
  return [
    ["target tokens/s", number(target.tokens_per_second), modelName(target.model)],
    ["drafter tokens/s", number(sum(groups, g => g.tokens_per_second)),
      `${number(live)} of ${number(workers.length)} workers live`],
    ["rows published", number(published),
      target.total_rows == null ? "" : `of ${number(target.total_rows)}`],
    ["rows trained", number(sum(groups, g => g.trained_rows)), many ? "over all groups" : ""],
    ["furthest step", number(Math.max(0, ...groups.map(g => g.step))), ""],
    ["ring in use", share(usedShare(rings)), status.transport?.chosen ?? ""],
    ["target blocked", share(bottleneck.blocked_share), "of the last 30 s"],
    ["drafter starved", share(bottleneck.starved_share), "of the last 30 s"],
  ];
}

function makeFigure(label) {
  const box = element("div"), of = element("dd", "of");
  box.append(element("dt", "", label), element("dd"), of);
  return box;
}

function makeOverdue(writeStacks) {
  return () => {
    const item = element("li"), button = element("button", "small", "Write its stacks");
    button.type = "button";
    button.addEventListener("click", () => writeStacks(item.instance));
    item.append(element("span"), button);
    return item;
  };
}

export class Figures {
  constructor(writeStacks) {
    this.figures = new Keyed(makeFigure);
    this.overdue = new Keyed(makeOverdue(writeStacks));
  }

  draw(status) {
    const {run, bottleneck} = status;
    setText(at("run-name"), run.name);
    setText(at("run-state"), run.state);
    setClass(at("run-state"), `badge ${STATE_TONES[run.state] ?? ""}`.trim());
    document.title = `${run.name}: ${run.state} - ringdraft`;
    this.drawFigures(figuresOf(status));
    setText(at("bottleneck"), `Bottleneck: ${bottleneck.name}; ${bottleneck.reason}`);
    setText(at("advice"), bottleneck.advice ? `To add: ${bottleneck.advice.text}` : "");
    const isDue = EXPECTING.has(run.state) && !status.is_ready;
    setText(at("unready"), isDue ? `Not ready: ${status.not_ready_reason}` : "");
    at("run-state").title = `control plane up for ${duration(run.uptime_seconds)}`;
    this.drawOverdue(status.overdue);
  }

  drawFigures(figures) {
    const nodes = this.figures.take(figures.map(([label]) => label));
    nodes.forEach((node, index) => {
      setText(node.children[1], figures[index][1]);
      setText(node.children[2], figures[index][2]);
    });
    setChildren(at("figures"), nodes);
  }

  drawOverdue(overdue) {
    const nodes = this.overdue.take(overdue.map(found => `${found.instance} ${found.pid}`));
    nodes.forEach((node, index) => {
      const found = overdue[index];
      node.instance = found.instance;
      setClass(node, found.condition === "silent" ? "bad" : "");
      setText(node.children[0], found.text);
      // Who is silent hears no command.
      node.children[1].hidden = found.condition === "silent";
      node.children[1].setAttribute("aria-label", `Write the stacks of ${found.instance}`);
    });
    setChildren(at("overdue"), nodes);
  }
}
