// The past, from /history: all of it once, then what is later than the last sample that is known.
// A control plane that was started anew knows less than the page, which keeps what it has.

const MAX_SAMPLES = 2000;
const MAX_EVENTS = 200;  // of each kind, so that checkpoints push no failure out
const LEAST_MILLISECONDS = 1000;

export class History {
  constructor(onChange) {
    this.onChange = onChange;
    this.samples = [];
    this.events = [];
    this.isAsking = false;
    this.askedAt = -Infinity;
  }

  async refresh() {
    if (this.isAsking || performance.now() - this.askedAt < LEAST_MILLISECONDS) return;
    this.isAsking = true;
    this.askedAt = performance.now();
    try {
      const answer = await fetch(`history?after=${this.lastTime()}`);
      if (answer.ok) this.merge(await answer.json());
    } catch {
      // The link says that there is no control plane.
    } finally {
      this.isAsking = false;
    }
  }

  lastTime() {
    return this.samples.at(-1)?.time ?? 0;
  }

  merge({samples, events}) {
    if (!samples.length) return;
    this.samples.push(...samples);
    if (this.samples.length > MAX_SAMPLES) this.samples = thinOlder(this.samples);
    this.addEvents(events);
    this.onChange();
  }

  // Events come with the sample of their time, or between two; some may come twice.
  addEvents(events) {
    const known = new Set(this.events.map(keyOf));
    this.events.push(...events.filter(event => !known.has(keyOf(event))));
    this.events.sort((one, other) => one.time - other.time);
    this.events = lastOfEachKind(this.events, MAX_EVENTS);
  }
}

const keyOf = event => JSON.stringify([event.time, event.kind, event.instance, event.text]);

export function lastOfEachKind(events, most) {
  const left = new Map();
  const isLate = ({kind}) => {
    left.set(kind, (left.get(kind) ?? most) - 1);
    return left.get(kind) >= 0;
  };
  return [...events].reverse().filter(isLate).reverse();
}

function thinOlder(samples) {
  const half = samples.length >> 1;
  return samples.filter((_, index) => index >= half || index % 2 === 0);
}
