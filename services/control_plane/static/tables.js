// The tables of the page: which columns they have, and which rows of /status and /history.

import {at, element} from "./dom.js";
import {lastOfEachKind} from "./history.js";
import {Table} from "./table.js";
import {counts, mebibytes, modelName, moment, number, share} from "./text.js";

const LIVE = new Set(["ok", "stalled"]);
const SHOWN_EVENTS = 50;  // of each kind
const TONES = {ok: "badge good", silent: "badge bad", failed: "badge bad", stalled: "badge warn"};

export const isLive = view => LIVE.has(view.condition);

const isPlain = ({condition, phase}) =>
  condition === "ok" || condition === phase || condition === "ended" && phase === "done";
const health = view => isPlain(view) ? view.phase : `${view.phase}, ${view.condition}`;
const tone = view => view.condition === "ok" && view.phase !== "running" ? "badge"
  : TONES[view.condition] ?? "badge";
const figure = (head, cell) => ({head, cell, isNumber: true});
const text = (head, cell) => ({head, cell});
const name = (head, cell) => ({head, cell, isName: true});
const long = (head, cell) => ({head, cell, isLong: true});
const state = {head: "state", cell: health, tone};
const of = view => view.report ?? {};

const shortUuid = uuid => uuid.slice(0, 12);

function gpu(view) {
  const {gpu_uuid: uuid, device} = of(view);
  return uuid ? shortUuid(uuid) : device ?? "-";
}

const detail = view => view.condition === "failed" && view.exit_reason ? view.exit_reason : view.detail;

const heldOut = view => (of(view).held_out ?? [])[0]?.acceptance_length;

const workerColumns = drainWorker => [
  name("worker", w => w.instance),
  name("group", w => of(w).group ?? "-"),
  text("GPU", gpu),
  state,
  figure("step", w => number(of(w).step)),
  figure("loss", w => number(of(w).loss, 4)),
  figure("tokens/s", w => number(of(w).tokens_per_second)),
  figure("starved", w => share(w.starved_share)),
  figure("last\u00a0step, s\u00a0ago", w => number(of(w).last_step_age_seconds, 1)),
  long("detail", detail),
  figure("step,\u00a0s", w => number(of(w).step_seconds, 3)),
  figure("held out", w => number(heldOut(w), 3)),
  figure("first step,\u00a0s", w => number(of(w).seconds_to_first_step, 1)),
  figure("recompiles", w => number(of(w).recompiles)),
  figure("memory,\u00a0MiB", w => mebibytes(of(w).memory_bytes)),
  {head: "drain", button: w => isLive(w) && w.phase !== "draining" && w.phase !== "done"
    ? {label: "Drain\u2026", name: `Drain ${w.instance}`, act: () => drainWorker(w.instance)} : null},
];

const GROUPS = [
  name("group", g => g.group),
  figure("workers", g => number(g.num_live_workers)),
  figure("in its meetings", g => g.num_members ? number(g.num_members) : "-"),
  figure("step", g => number(g.step)),
  figure("loss", g => number(g.loss, 4)),
  figure("accepted prefix", g => number(g.accepted_prefix_length, 3)),
  figure("acceptance length", g => number(g.acceptance_length, 3)),
  figure("best", g => number(g.best_acceptance_length, 3)),
  figure("held out", g => number(g.held_out_acceptance_length, 3)),
  figure("at step", g => number(g.held_out_step)),
  figure("tokens/s", g => number(g.tokens_per_second)),
  figure("rows trained", g => number(g.trained_rows)),
  figure("rows skipped", g => number(g.account?.skipped)),
  long("last checkpoint", g => g.last_checkpoint.split("/checkpoints/").at(-1) || "-"),
];

const TARGETS = [
  name("target server", t => t.instance),
  state,
  figure("tokens/s", t => number(of(t).tokens_per_second)),
  figure("captured tokens", t => number(of(t).captured_tokens)),
  figure("blocked", t => share(t.blocked_share)),
  long("detail", detail),
];

const RINGS = [
  name("ring", r => r.instance),
  text("transport", r => r.transport),
  figure("MiB", r => mebibytes(r.num_bytes, 1)),
  text("slots", r => counts(r.slots)),
  text("deliveries", r => counts(r.deliveries)),
  figure("oldest lease,\u00a0s", r => number(r.oldest_lease_seconds, 1)),
  text("target", r => r.is_blocked ? "waits for a slot" : "has room"),
  long("groups without a worker", r => r.absent_groups.map(absence).join(", ") || "-"),
  long("why this transport", r => r.transport_reason),
];

const GPUS = [
  name("GPU", g => shortUuid(g.uuid)),
  text("name", g => g.name),
  figure("index", g => number(g.index)),
  figure("memory,\u00a0MiB", g => mebibytes(g.total_bytes)),
  figure("free for more,\u00a0MiB", g => mebibytes(g.free_bytes)),
  text("kept for", g => g.is_reserved ? "targets" : "anyone"),
  long("who has it", g => g.holders.map(holder => holder.instance).join(", ") || "-"),
];

const EVALUATORS = [
  name("evaluator", e => e.instance),
  state,
  long("detail", detail),
];

const EVALUATIONS = [
  name("group", e => e.group || "-"),
  figure("worker", e => e.index ?? "-"),
  figure("step", e => number(e.step)),
  name("arm", e => e.arm),
  figure("temperature", e => number(e.temperature, 1)),
  figure("acceptance length", e => number(e.acceptance_length, 3)),
  figure("by replay", e => number(e.replay_acceptance_length, 3)),
  figure("speed-up", e => number(e.speedup, 2)),
  figure("prompts", e => number(e.num_prompts)),
];

const ALARMS = [
  name("group", a => a.group || "-"),
  figure("worker", a => a.index ?? "-"),
  figure("step", a => number(a.step)),
  long("alarm", a => a.text),
];

const ERRORS = [
  name("instance", e => e.instance),
  figure("s\u00a0ago", e => number(e.age_seconds)),
  long("error", e => e.text),
];

const EVENTS = [
  {head: "time", cell: e => moment(e.time), isMoment: true},
  text("kind", e => e.kind),
  name("about", e => e.instance || "run"),
  long("what", e => e.text),
];

function absence(group) {
  const what = group.is_detached ? "detached" : `${number(group.num_waiting)} rows wait`;
  return `${group.group} (${what}, ${number(group.absent_seconds)} s)`;
}

// Who is in trouble comes first; main-10 comes after main-2.
const RANKS = {failed: 0, silent: 1, stalled: 2, ok: 3, ended: 4};
const names = new Intl.Collator("en", {numeric: true});
const inOrder = views => [...views].sort((one, other) =>
  RANKS[one.condition] - RANKS[other.condition] || names.compare(one.instance, other.instance));

function tally(views) {
  const found = {};
  for (const view of views) found[view.condition] = (found[view.condition] ?? 0) + 1;
  return counts(found);
}

function column(...tables) {
  const made = element("div", "column");
  made.append(...tables.map(table => table.section));
  return made;
}

export class Tables {
  constructor(drainWorker) {
    const bySession = view => view.session;
    const make = (name, title, columns, keyOf, options) =>
      new Table(name, {title, columns, keyOf, ...options});
    const whole = {isWhole: true};
    this.workers = make("workers", "Workers", workerColumns(drainWorker), bySession);
    this.groups = make("groups", "Groups", GROUPS, g => g.group);
    this.rings = make("rings", "Rings", RINGS, r => r.instance);
    this.gpus = make("gpus", "GPUs", GPUS, g => g.uuid);
    this.targets = make("targets", "Target servers", TARGETS, bySession);
    this.evaluators = make("evaluators", "Evaluators", EVALUATORS, bySession);
    this.evaluations = make("evaluations", "Evaluations", EVALUATIONS,
      e => `${e.checkpoint} ${e.arm} ${e.temperature}`);
    this.events = make("events", "Events", EVENTS, e => `${e.time} ${e.kind} ${e.instance}`, whole);
    this.alarms = make("alarms", "Alarms", ALARMS, a => `${a.group} ${a.index} ${a.step}`);
    this.errors = make("errors", "Errors", ERRORS, e => `${e.instance} ${e.text}`, whole);
    this.place();
  }

  place() {
    const columns = element("div", "columns");
    columns.append(column(this.targets, this.evaluators, this.evaluations),
      column(this.events, this.alarms, this.errors));
    at("tables").append(this.workers.section, this.groups.section, this.rings.section,
      this.gpus.section, columns);
  }

  draw(status) {
    this.workers.draw(inOrder(status.workers), tally(status.workers));
    this.groups.draw(status.groups);
    this.targets.draw(inOrder(status.target.instances), modelName(status.target.model));
    this.rings.draw(status.rings);
    this.gpus.draw(status.gpus);
    this.gpus.section.hidden = !status.gpus.length;  // on a CPU there is nothing to say
    this.evaluators.draw(inOrder(status.evaluators));
    this.evaluations.draw([...status.evaluations].reverse());
    this.alarms.draw([...status.alarms].reverse());
    this.errors.draw([...status.errors].reverse());
  }

  drawEvents(events) {
    const shown = lastOfEachKind(events, SHOWN_EVENTS).reverse();
    this.events.draw(shown, shown.length < events.length ? `the last ${SHOWN_EVENTS} of each kind` : "");
  }
}
