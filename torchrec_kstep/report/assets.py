"""Style and script of the page, kept inside it. Colours: six hues that differ in lightness too, for colour-blind readers."""

COLOURS = ("#2563b0", "#d9731a", "#2a8f6d", "#8d4fb3", "#b8324f", "#7a7416")  # as in the light page below

STYLE = """
:root { color-scheme: light dark;
  --paper: #fcfcfb; --ink: #1d1f21; --soft: #5f666d; --line: #e2e4e6; --tile: #f2f3f4;
  --series-0: #2563b0; --series-1: #d9731a; --series-2: #2a8f6d; --series-3: #8d4fb3; --series-4: #b8324f; --series-5: #7a7416; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #16181a; --ink: #e6e8ea; --soft: #9aa1a8; --line: #303438; --tile: #1f2225;
  --series-0: #6ea8f0; --series-1: #f0a04e; --series-2: #58c49f; --series-3: #c392e6; --series-4: #f07b93; --series-5: #cdc45c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; font-weight: 650; }
h2 { font-size: 18px; margin: 36px 0 12px; font-weight: 650; }
.under { color: var(--soft); margin: 0 0 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); gap: 10px; }
.tile { background: var(--tile); border-radius: 8px; padding: 10px 14px; }
.tile span { display: block; color: var(--soft); font-size: 13px; }
.tile b { font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 28px 32px; }
figure { margin: 0; position: relative; }
figcaption { font-weight: 600; margin-bottom: 6px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--line); }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .pointer { stroke: var(--soft); stroke-dasharray: 3 3; visibility: hidden; }
svg.bar { height: 22px; border-radius: 5px; overflow: hidden; margin-bottom: 12px; }
.values { position: absolute; top: 30px; visibility: hidden; pointer-events: none; background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; padding: 6px 10px; font-size: 13px; box-shadow: 0 2px 10px rgb(0 0 0 / 18%); white-space: nowrap; z-index: 1; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; }
.pairs { margin: 6px 0 16px; } .pairs th { font-weight: 400; color: var(--soft); }
.pairs td { white-space: normal; overflow-wrap: anywhere; }
small { color: var(--soft); margin-left: 6px; }
details { border-top: 1px solid var(--line); padding: 10px 0; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; } code { font: 13px ui-monospace, monospace; }
.nothing { color: var(--soft); padding: 40px 0; }
"""

# Shows the values nearest to the pointer on a chart.
SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-curves]")) {
  const chart = JSON.parse(figure.dataset.curves), [low, high, left, right] = chart.x;
  const svg = figure.querySelector("svg"), pointer = svg.querySelector(".pointer"), box = figure.querySelector(".values");
  const show = (visible) => { pointer.style.visibility = box.style.visibility = visible ? "visible" : "hidden"; };
  svg.addEventListener("pointermove", (event) => {
    const scale = svg.viewBox.baseVal.width / svg.clientWidth;
    const wanted = low + (event.offsetX * scale - left) / (right - left) * (high - low);
    const near = chart.series.map((s) => s.points.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a));
    const x = near.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a)[0];
    const at = left + (x - low) / (high - low) * (right - left);
    pointer.setAttribute("x1", at); pointer.setAttribute("x2", at);
    box.replaceChildren(Object.assign(document.createElement("div"), { textContent: chart.label + " " + (chart.names[x] || x) }));
    chart.series.forEach((series, index) => {
      const row = document.createElement("div"), mark = document.createElement("i");
      mark.className = "swatch"; mark.style.background = "var(--series-" + series.colour + ")";
      row.append(mark, (chart.series.length > 1 ? series.name + " " : "") + near[index][1].toPrecision(chart.digits));
      box.append(row);
    });
    const onLeft = at > (left + right) / 2;
    box.style.left = onLeft ? "auto" : at / scale + 12 + "px";
    box.style.right = onLeft ? svg.clientWidth - at / scale + 12 + "px" : "auto";
    show(true);
  });
  svg.addEventListener("pointerleave", () => show(false));
}
"""
