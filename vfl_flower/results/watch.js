"use strict";
// Show the page as it is now. What was unfolded stays unfolded, and the charts keep their x-axis.
const apart = 2000; // milliseconds between two looks
let shown = "";

function name(details) {
  const section = details.closest("section");
  const place = [...section.querySelectorAll("details")].indexOf(details);
  return `${section.querySelector("h2").textContent} ${place}`;
}

function axis() {
  return document.querySelector(".axes :checked + label")?.textContent;
}

function show(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const open = new Set([...document.querySelectorAll("details[open]")].map(name));
  const focused = document.activeElement.closest("details");
  const focus = focused ? name(focused) : null;
  const against = axis();
  document.title = fresh.title;
  document.body.replaceChildren(...fresh.body.childNodes);
  for (const each of document.querySelectorAll("details")) {
    each.open = open.has(name(each));
    if (name(each) === focus) each.querySelector("summary").focus({ preventScroll: true });
  }
  for (const each of document.querySelectorAll(".axes label")) {
    if (each.textContent === against) each.control.checked = true;
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
