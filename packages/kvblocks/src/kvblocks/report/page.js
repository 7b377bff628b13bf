"use strict";
(() => {
  const tip = document.getElementById("tip");

  function show(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 4))}px`;
  }

  function hide() {
    tip.hidden = true;
  }

  // Anything with a tip of its own.
  for (const part of document.querySelectorAll("[data-tip]")) {
    part.addEventListener("pointermove", (event) => show(part.dataset.tip, event.clientX, event.clientY));
    part.addEventListener("pointerleave", hide);
    part.addEventListener("focus", () => {
      const box = part.getBoundingClientRect();
      show(part.dataset.tip, box.left + box.width / 2, box.bottom - 8);
    });
    part.addEventListener("blur", hide);
  }

  // Charts: stops are places along x, each with the text that belongs there.
  for (const chart of document.querySelectorAll("svg[data-stops]")) {
    const stops = JSON.parse(chart.dataset.stops);
    const cursor = chart.querySelector(".cursor");
    let at = -1;

    const visit = (index, y) => {
      at = Math.max(0, Math.min(index, stops.length - 1));
      const stop = stops[at];
      cursor.setAttribute("x1", stop.x);
      cursor.setAttribute("x2", stop.x);
      cursor.style.visibility = "visible";
      const scale = chart.getBoundingClientRect().width / chart.viewBox.baseVal.width;
      const box = chart.getBoundingClientRect();
      show(stop.text, box.left + stop.x * scale, y ?? box.top + 40);
    };
    const leave = () => {
      cursor.style.visibility = "hidden";
      at = -1;
      hide();
    };
    const nearest = (event) => {
      const box = chart.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
      let best = 0;
      stops.forEach((stop, index) => {
        if (Math.abs(stop.x - x) < Math.abs(stops[best].x - x)) best = index;
      });
      return best;
    };

    chart.addEventListener("pointermove", (event) => visit(nearest(event), event.clientY));
    chart.addEventListener("pointerleave", leave);
    chart.addEventListener("blur", leave);
    chart.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: stops.length - 1 };
      if (event.key === "Escape") {
        leave();
      } else if (event.key in steps) {
        visit(steps[event.key]);
        event.preventDefault();
      }
    });
  }

  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });
})();
