// The run's token: asked for when a command needs it, kept for this tab only and never in an address.

import {at, setText} from "./dom.js";

const KEY = "ringdraft token";

export class Token {
  constructor() {
    this.forgetButton = at("forget");
    this.forgetButton.hidden = !this.value;
    at("ask-no").addEventListener("click", () => at("ask").close(""));
    at("ask-form").addEventListener("submit", event => {
      event.preventDefault();
      at("ask").close(at("ask-token").value.trim());
    });
  }

  get value() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set value(token) {
    if (token) sessionStorage.setItem(KEY, token); else sessionStorage.removeItem(KEY);
    this.forgetButton.hidden = !token;
  }

  // Returns the token that was typed, or "" where there is to be none.
  ask(directory, problem) {
    const where = directory ? `${directory}/control.token` : "the run's control.token";
    setText(at("ask-text"), `Commands need the token that ${where} holds. It is kept until this tab is closed.`);
    setText(at("ask-error"), problem);
    at("ask-token").value = "";
    const dialog = at("ask");
    dialog.returnValue = "";  // Escape leaves it as it was
    dialog.showModal();
    return new Promise(resolve => dialog.addEventListener("close", () => {
      this.value = dialog.returnValue;
      at("ask-token").value = "";
      dialog.returnValue && resolve(dialog.returnValue);
      resolve("");
    }, {once: true}));
  }
}
