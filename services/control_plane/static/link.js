// The stream of /events, opened again whenever it ends or falls silent.

const AGAIN_MILLISECONDS = 1000;
const SILENT_MILLISECONDS = 5000;

export class Link {
  constructor({onStatus, onChange}) {
    this.onStatus = onStatus;
    this.onChange = onChange;
    this.isConnected = false;
    this.receivedAt = null;
  }

  // Seconds since the last figures came, by this machine's clock alone.
  get age() {
    return this.receivedAt === null ? null : (performance.now() - this.receivedAt) / 1000;
  }

  open() {
    this.source = new EventSource("events");
    this.source.addEventListener("status", event => this.take(event.data));
    this.source.onerror = () => this.lose();
    this.watch();
  }

  take(text) {
    this.receivedAt = performance.now();
    this.watch();
    this.setConnected(true);
    this.onStatus(JSON.parse(text));
  }

  // A connection may be dead without a sign of it.
  watch() {
    clearTimeout(this.watchdog);
    this.watchdog = setTimeout(() => this.lose(), SILENT_MILLISECONDS);
  }

  lose() {
    clearTimeout(this.watchdog);
    this.source.close();
    this.setConnected(false);
    clearTimeout(this.again);
    this.again = setTimeout(() => this.open(), AGAIN_MILLISECONDS);
  }

  setConnected(isConnected) {
    const isNews = isConnected !== this.isConnected;
    this.isConnected = isConnected;
    if (isNews || !isConnected) this.onChange(isConnected);
  }
}
