"""The page at `/`: a run's figures, live, from one file that loads nothing from elsewhere.

It draws what /events sends and holds no figure of its own. Text goes into the page as text
nodes only, since names and details come from other processes.
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ringdraft</title>
<link rel="icon" href="data:,">
<style>
  :root { color-scheme: light dark; --line: #8885; --quiet: #888; --bad: #c33; --good: #2a7; }
  body { font: 14px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1rem; }
  h1 { font-size: 1.15rem; margin: 0; } h2 { font-size: .95rem; margin: 1.4rem 0 .3rem; }
  header { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; }
  .quiet { color: var(--quiet); } .bad { color: var(--bad); } .good { color: var(--good); }
  .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .6rem;
           margin-top: .8rem; }
  .card { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; }
  .card b { display: block; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line);
           vertical-align: top; }
  th { font-weight: 500; color: var(--quiet); }
</style>
</head>
<body>
<header>
  <h1>ringdraft</h1><span id="run"></span><span id="state"></span>
  <span id="link" class="quiet" role="status">connecting</span>
</header>
<div id="cards" class="cards"></div>
<p id="bottleneck"></p>
<div id="tables"></div>
<script>
"use strict";
const at = id => document.getElementById(id);
const number = (value, digits = 0) => value == null ? "-" :
  value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const share = value => value == null ? "-" : (100 * value).toFixed(0) + " %";
const counts = map => Object.entries(map).map(([key, value]) => key + " " + value).join(", ") || "-";

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text != null) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function card(label, value) {
  const made = element("div", label, "card quiet");
  made.prepend(element("b", value));
  return made;
}
function table(title, heads, rows) {
  const made = element("section");
  made.append(element("h2", title));
  if (!rows.length) { made.append(element("p", "none yet", "quiet")); return made; }
  const body = element("table"), head = element("tr"), scroll = element("div", null, "scroll");
  heads.forEach(text => head.append(element("th", text)));
  body.append(head);
  for (const row of rows) {
    const line = element("tr");
    row.forEach(cell => line.append(element("td", cell)));
    body.append(line);
  }
  scroll.append(body);
  made.append(scroll);
  return made;
}
function sum(groups, field) { return groups.reduce((total, group) => total + group[field], 0); }
function health(view) {
  return view.condition === "ok" ? view.phase : view.phase + " (" + view.condition + ")";
}
function absence(group) {
  return group.group + (group.is_detached ? " (detached" : " (" + group.num_waiting + " rows wait") +
    ", " + number(group.absent_seconds) + " s)";
}
function draw(status) {
  at("run").textContent = status.run.name;
  at("state").textContent = status.run.state;
  at("state").className = status.run.state === "failed" ? "bad" : status.is_ready ? "good" : "quiet";
  const published = status.groups.map(group => group.account ? group.account.published : 0);
  at("cards").replaceChildren(
    card("target tokens/s", number(status.target.tokens_per_second)),
    card("drafter tokens/s", number(sum(status.groups, "tokens_per_second"))),
    card("rows published", number(Math.max(0, ...published))),
    card("rows trained", number(sum(status.groups, "trained_rows"))),
    card("target blocked", share(status.bottleneck.blocked_share)),
    card("drafter starved", share(status.bottleneck.starved_share)));
  at("bottleneck").textContent = "bottleneck: " + status.bottleneck.name + " - " +
    status.bottleneck.reason + (status.is_ready ? "" : " | not ready: " + status.not_ready_reason);
  at("tables").replaceChildren(
    table("Groups", ["group", "workers", "step", "loss", "accepted prefix", "acceptance length",
                     "best", "held out", "at step", "rows skipped", "last checkpoint"],
      status.groups.map(g => [g.group, g.num_live_workers, number(g.step), number(g.loss, 4),
        number(g.accepted_prefix_length, 3), number(g.acceptance_length, 3),
        number(g.best_acceptance_length, 3), number(g.held_out_acceptance_length, 3),
        number(g.held_out_step), number((g.account || {}).skipped), g.last_checkpoint || "-"])),
    table("Workers", ["worker", "group", "phase", "step", "tokens/s", "loss", "held out", "starved",
                      "step s", "first step s", "recompiles", "memory MiB", "last step s ago", "detail"],
      status.workers.map(w => { const r = w.report || {}; return [w.instance,
        r.group ?? "-", health(w), number(r.step), number(r.tokens_per_second), number(r.loss, 4),
        number(((r.held_out || [])[0] || {}).acceptance_length, 3), share(w.starved_share), number(r.step_seconds, 3), number(r.seconds_to_first_step, 1),
        number(r.recompiles),
        r.memory_bytes == null ? "-" : number(r.memory_bytes / 1048576),
        number(r.last_step_age_seconds, 1), w.detail]; })),
    table("Target servers", ["instance", "phase", "tokens/s", "captured tokens", "blocked", "detail"],
      status.target.instances.map(t => { const r = t.report || {}; return [t.instance, health(t),
        number(r.tokens_per_second), number(r.captured_tokens), share(t.blocked_share), t.detail]; })),
    table("Rings", ["ring", "transport", "MiB", "slots", "deliveries", "oldest lease s",
                    "groups without a worker", "why"],
      status.rings.map(r => [r.instance, r.transport, number(r.num_bytes / 1048576, 1),
        counts(r.slots), counts(r.deliveries), number(r.oldest_lease_seconds, 1),
        r.absent_groups.map(absence).join(", ") || "-", r.transport_reason])),
    table("Alarms", ["group", "index", "step", "alarm"],
      status.alarms.map(a => [a.group, a.index ?? "-", number(a.step), a.text])),
    table("Evaluations", ["group", "index", "step", "arm", "temperature", "acceptance length",
                          "replay", "speed-up", "prompts"],
      status.evaluations.map(e => [e.group, e.index ?? "-", number(e.step), e.arm, e.temperature,
        number(e.acceptance_length, 3), number(e.replay_acceptance_length, 3),
        number(e.speedup, 2), number(e.num_prompts)])),
    table("Errors", ["instance", "seconds ago", "error"],
      status.errors.map(e => [e.instance, number(e.age_seconds), e.text])));
}
const source = new EventSource("events");
source.addEventListener("status", event => {
  at("link").textContent = "live"; at("link").className = "quiet";
  draw(JSON.parse(event.data));
});
source.onerror = () => {
  at("link").textContent = "control plane not reachable, trying again"; at("link").className = "bad";
};
</script>
</body>
</html>
"""
