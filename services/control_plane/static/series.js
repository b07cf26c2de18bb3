// What the charts draw, from the samples of /history: {isTime, xs, lines: [{label, ys, color}]}.
// Colours go by owner: 0 is the target, a group has the same one in every chart.

const RECENT_SECONDS = 300;

export function within(samples, span) {
  if (span !== "recent" || !samples.length) return samples;
  const start = samples.at(-1).time - RECENT_SECONDS;
  return samples.filter(sample => sample.time >= start);
}

function names(samples, pick) {
  const found = new Set();
  for (const sample of samples) for (const name of Object.keys(pick(sample))) found.add(name);
  return [...found].sort(new Intl.Collator("en", {numeric: true}).compare);
}

const groupNames = samples => names(samples, sample => sample.groups);

function byTime(samples, lines) {
  return {
    isTime: true,
    xs: samples.map(sample => sample.time),
    lines: lines.map(({pick, ...line}) => ({...line, ys: samples.map(s => pick(s) ?? null)})),
  };
}

export function throughput(samples) {
  const groups = groupNames(samples).map((name, index) => ({
    label: `drafter ${name}`, color: index + 1, pick: s => s.groups[name]?.tokens_per_second,
  }));
  return byTime(samples, [
    {label: "target", color: 0, pick: s => s.target_tokens_per_second}, ...groups,
  ]);
}

export function occupancy(samples) {
  return byTime(samples, names(samples, s => s.ring_used_shares).map((name, index) => ({
    label: name, color: index, pick: s => s.ring_used_shares[name],
  })));
}

export function waiting(samples) {
  return byTime(samples, [
    {label: "target blocked", color: 0, pick: s => s.blocked_share},
    {label: "drafter starved", color: 1, pick: s => s.starved_share},
  ]);
}

export function loss(samples, axis) {
  return curves(samples, axis, [{suffix: "", field: "loss", stepField: "step"}]);
}

export function acceptedPrefix(samples, axis) {
  return curves(samples, axis, [{suffix: "", field: "accepted_prefix_length", stepField: "step"}]);
}

// By decoding (points, as they are measured now and then) and on held-out text (lines).
export function acceptance(samples, axis, evaluations) {
  const heldOut = {suffix: " held out", field: "held_out_acceptance_length", stepField: "held_out_step"};
  const decoded = {suffix: " decoded", field: "acceptance_length", isPoints: true, measured: evaluations};
  return curves(samples, axis, [heldOut, decoded]);
}

function curves(samples, axis, kinds) {
  const lines = groupNames(samples).flatMap((name, index) => kinds.map(kind => ({
    ...kind, name, label: name + kind.suffix, color: index + 1,
  }))).filter(line => samples.some(s => s.groups[line.name]?.[line.field] != null));
  if (axis === "step") return byStep(samples, lines);
  return byTime(samples, lines.map(line => ({
    label: line.label, color: line.color, isPoints: false, isDashed: line.isPoints,
    pick: s => s.groups[line.name]?.[line.field],
  })));
}

// Steps go back when a group is resumed from a checkpoint: what was trained last holds.
function byStep(samples, lines) {
  const values = lines.map(line => line.measured ? measuredAt(line) : trainedAt(samples, line));
  const xs = [...new Set(values.flatMap(map => [...map.keys()]))].sort((a, b) => a - b);
  return {
    isTime: false,
    xs,
    lines: lines.map(({label, color, isPoints}, index) => ({
      // A step that another line has is no gap in this one.
      label, color, isPoints, ys: xs.map(step => values[index].get(step)),
    })),
  };
}

function trainedAt(samples, {name, field, stepField}) {
  const found = new Map();
  for (const {groups} of samples) {
    const group = groups[name];
    if (group && group[stepField] != null) found.set(group[stepField], group[field]);
  }
  return found;
}

function measuredAt({name, measured}) {
  const mine = measured.filter(result => result.group === name && result.is_headline);
  return new Map(mine.map(result => [result.step, result.acceptance_length]));
}
