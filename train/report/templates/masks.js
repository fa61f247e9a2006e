"use strict";
// Details of the token under the pointer, or of the one that was tapped. Text only: nothing of a run becomes markup.
(() => {
  const panel = document.getElementById("detail");
  if (!panel) return;
  const why = panel.querySelector(".why");
  const list = panel.querySelector("dl");
  let pinned = null;
  // Without a script the reason is the browser's own tooltip; with one it would be said twice.
  for (const run of document.querySelectorAll(".run[title]")) {
    run.dataset.why = run.title;
    run.removeAttribute("title");
  }

  const rows = (token, run) => {
    const logprobs = (token.dataset.p || "").split(" ").filter(Boolean).map(Number);
    const sum = logprobs.reduce((a, b) => a + b, 0);
    const ids = token.dataset.d.split(" ");
    const chance = logprobs.length ? ` nats (probability ${Math.exp(sum).toPrecision(3)})` : "";
    return [
      [ids.length > 1 ? "tokens" : "token", ids.length > 1 ? `${token.dataset.i} to ${+token.dataset.i + ids.length - 1}` : token.dataset.i],
      [ids.length > 1 ? "ids" : "id", ids.join(" ")],
      ["source", run.dataset.source + (token.className.includes("c") ? ", control token" : "")],
      ["turn", run.dataset.turn],
      ["logprob", logprobs.length ? logprobs.join(" ") + chance : ""],
      ["advantage", run.dataset.advantage],
      ["policy version", run.dataset.version],
      ["completion", run.dataset.completion ? `${run.dataset.completion} at ${token.dataset.n}` : ""],
    ].filter(([, value]) => value);
  };

  const show = (token) => {
    const run = token.closest(".run");
    why.textContent = run.dataset.why;
    list.replaceChildren(...rows(token, run).map(([name, value]) => {
      const row = document.createElement("div");
      const term = document.createElement("dt");
      const text = document.createElement("dd");
      term.textContent = name;
      text.textContent = value;
      row.append(term, text);
      return row;
    }));
    panel.hidden = false;
  };

  const find = (event) => event.target instanceof Element ? event.target.closest(".tokens [data-i]") : null;
  document.addEventListener("pointerover", (event) => {
    const token = find(event);
    if (token) show(token);
    else if (pinned) show(pinned);
    else panel.hidden = true;
  });
  document.addEventListener("click", (event) => {
    const token = find(event);
    if (pinned) pinned.classList.remove("pinned");
    pinned = token && token !== pinned ? token : null;
    if (pinned) {
      pinned.classList.add("pinned");
      show(pinned);
    } else panel.hidden = true;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (pinned) pinned.classList.remove("pinned");
    pinned = null;
    panel.hidden = true;
  });
})();
