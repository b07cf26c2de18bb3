// The buttons: what they ask of the control plane, whom that needs, and what came of it.

import {at, setClass, setText} from "./dom.js";
import {isLive} from "./tables.js";
import {Token} from "./token.js";

const CONFIRMED = {
  drain: ["Drain the run?", "Every worker takes no more rows, steps with what it holds, writes a checkpoint and ends.", "Drain"],
  stop: ["Stop the run?", "Every service ends: targets, workers and evaluators. Workers write a checkpoint first.", "Stop"],
};
const NEEDS = {
  pause: ["A target or a worker", status => [...status.target.instances, ...status.workers]],
  checkpoint: ["A worker", status => status.workers],
  evaluate: ["An evaluator that follows the run", status => status.evaluators],
  drain: ["A worker", status => status.workers],
  stop: ["A service", status => [...status.target.instances, ...status.workers, ...status.evaluators]],
};
const ENDING = ["drain", "stop"];

export class Commands {
  constructor(link) {
    this.link = link;
    this.token = new Token();
    this.buttons = [...document.querySelectorAll("[data-command]")];
    for (const button of this.buttons) {
      button.addEventListener("click", () => this.press(button));
    }
    at("forget").addEventListener("click", () => {
      this.token.value = "";
      this.say("The token is forgotten.");
      this.buttons[0].focus();
    });
  }

  draw(status) {
    this.status = status;
    for (const button of this.buttons) {
      const reason = this.whyNot(button.dataset.command);
      button.setAttribute("aria-disabled", String(Boolean(reason)));
      button.title = reason;
    }
    setText(this.buttons[0], this.isPaused() ? "Resume" : "Pause");
  }

  isPaused() {
    return this.status?.run.command === "pause";
  }

  // Why a button does nothing at this moment, or "".
  whyNot(name) {
    const {status} = this;
    if (!status || !this.link.isConnected) return "There is no connection to the control plane.";
    const given = status.run.command;
    const isUndone = name === "pause" || name === "drain" || name === given;
    if (ENDING.includes(given) && isUndone) return `The run has been told to ${given}.`;
    const [whom, pick] = NEEDS[name];
    return pick(status).some(view => isLive(view) && view.phase !== "done") ? "" : `${whom} is needed, and none is there.`;
  }

  async press(button) {
    const name = button.dataset.command;
    const reason = this.whyNot(name);
    if (reason) return this.say(reason, "bad");
    if (CONFIRMED[name] && !await confirm(...CONFIRMED[name])) return;
    const given = name === "pause" && this.isPaused() ? "resume" : name;
    await this.give(given === "evaluate" ? "evaluations" : `runs/${given}`);
  }

  async drainWorker(instance) {
    const text = `${instance} takes no more rows, steps with what it holds, writes a checkpoint and ends.`;
    if (await confirm(`Drain ${instance}?`, text, "Drain")) {
      await this.give(`workers/${encodeURIComponent(instance)}/drain`);
    }
  }

  async writeStacks(instance) {
    await this.give(`services/${encodeURIComponent(instance)}/stacks`);
  }

  async give(path, problem = "") {
    const directory = this.status?.run.directory;
    const token = !problem && this.token.value || await this.token.ask(directory, problem);
    if (!token) return;
    const {code, body} = await post(path, token);
    if (code === 401) {
      this.token.value = "";
      await this.give(path, "The control plane does not take this token.");
    } else if (code === 202) {
      const many = body.num_recipients === 1 ? "service" : "services";
      this.say(`${body.name}: given to ${body.num_recipients} ${many}.`);
    } else {
      this.say(body.detail ?? `The control plane answered ${code}.`, "bad");
    }
  }

  say(text, tone = "") {
    setClass(at("reply"), `reply ${tone}`.trim());
    // Emptied first, so that the same words are told again.
    at("reply").textContent = "";
    setTimeout(() => setText(at("reply"), text), 20);
  }
}

async function post(path, token) {
  if (/[^\x21-\x7e]/.test(token)) return {code: 401, body: {}};  // no header could carry it
  try {
    const answer = await fetch(path, {method: "POST", headers: {authorization: `Bearer ${token}`}});
    return {code: answer.status, body: await answer.json().catch(() => ({}))};
  } catch (error) {
    return {code: 0, body: {detail: `The command may not have arrived: ${error.message}`}};
  }
}

function confirm(title, text, verb) {
  const dialog = at("confirm");
  setText(at("confirm-title"), title);
  setText(at("confirm-text"), text);
  setText(at("confirm-yes"), verb);
  at("confirm-no").onclick = () => dialog.close("");
  at("confirm-yes").onclick = () => dialog.close("yes");
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise(resolve => dialog.addEventListener(
    "close", () => resolve(dialog.returnValue === "yes"), {once: true}));
}
