"use strict";
// The page as it is now takes the place of the one that is shown; what was unfolded stays so.
const apart = 2000; // milliseconds between two looks
let shown = "";

function name(details) {
  return details.closest("section").querySelector("h2").textContent;
}

function show(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const open = new Set([...document.querySelectorAll("details[open]")].map(name));
  const focused = document.activeElement.closest("details");
  const focus = focused ? name(focused) : null;
  document.title = fresh.title;
  document.body.replaceChildren(...fresh.body.childNodes);
  for (const each of document.querySelectorAll("details")) {
    each.open = open.has(name(each));
    if (name(each) === focus) each.querySelector("summary").focus({ preventScroll: true });
  }
}

async function look() {
  try {
    const reply = await fetch(location.href, { cache: "no-store" });
    const text = await reply.text();
    if (!reply.ok) throw new Error(reply.status);
    if (text !== shown) show(text);
    shown = text;
    document.body.classList.remove("stale");
  } catch {
    document.body.classList.add("stale");
  }
  setTimeout(look, apart);
}

setTimeout(look, apart);
