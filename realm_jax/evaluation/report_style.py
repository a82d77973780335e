"""The report's style sheet: light and dark, wide and narrow, on screen and on paper. Used by `report.py` alone."""

STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --card: #ffffff; --ink: #18202b; --soft: #586373; --line: #dfe2e7;
  --track: #eceef1; --realm: #0b5fc4; --ict: #c8590a; --bm25: #7b6bb0; --control: #a4acb8; --plain: #c9ced6;
  --band0: #f4f2ec; --band1: #e9eef6; --band2: #eff3ea;
  --mark: #ffe08a; --mark-ink: #3d2c00; --good: #13753b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #11151b; --card: #1a2028; --ink: #e8ebf0; --soft: #a0abba;
  --line: #303844; --track: #2a313b; --realm: #6db0ff; --ict: #f2a15f; --bm25: #b3a3ec; --control: #77818f;
  --plain: #525c69; --band0: #1e242d; --band1: #222c3a; --band2: #20302a;
  --mark: #6b5310; --mark-ink: #fff0c2; --good: #5fd08c;
  --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; overflow-wrap: anywhere; }
main { max-width: 1200px; margin: 0 auto; padding: 36px 40px 56px; }
h1 { font-size: clamp(1.55rem, 3.3vw, 2.5rem); line-height: 1.2; letter-spacing: -.015em; margin: .3em 0 .25em;
  max-width: 30em; text-wrap: balance; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 0 0 .2em; }
h3 { font-size: 1rem; margin: 0 0 .15em; }
p { margin: .2em 0 .8em; max-width: 46em; }
figure { margin: 0; }
.kicker { color: var(--soft); font-size: .95rem; margin: 0; }
.figures { display: block; color: var(--realm); font-variant-numeric: tabular-nums; }
.note { color: var(--soft); font-size: .92rem; max-width: 60em; }
header .quarters { margin: 22px 0 0; gap: 28px; } .point { border-top: 3px solid var(--realm); padding-top: 10px; }
.pair, .quarters { display: grid; gap: 20px; grid-template-columns: 1fr 1fr; }
.quarters { grid-template-columns: repeat(4, 1fr); gap: 16px; margin: 10px 0 0; }
main > .card, main > .pair, main > .single { margin-top: 20px; } main > section:not(.card) { margin-top: 36px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; min-width: 0; }
.bars + h3 { margin-top: 16px; } .corpus { margin-top: 1.2em; }
ul.bars, ul.legend { list-style: none; margin: 10px 0 0; padding: 0; }
.bar { display: grid; grid-template-columns: minmax(8em, 13.5em) 1fr 4.2em; gap: 12px; align-items: center;
  padding: 4px 0; line-height: 1.25; }
.bar .track { background: var(--track); border-radius: 4px; height: 20px; overflow: hidden; }
.bar .fill { display: block; height: 100%; border-radius: 4px; background: var(--kind); }
.bar .value { font-variant-numeric: tabular-nums; font-weight: 600; text-align: right; white-space: nowrap; }
.bar.realm .label { font-weight: 700; }
.realm { --kind: var(--realm); } .ict { --kind: var(--ict); } .bm25 { --kind: var(--bm25); }
.control { --kind: var(--control); } .plain { --kind: var(--plain); }
.other { --kind: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: .9rem; color: var(--soft); }
.legend i { display: inline-block; width: 1em; height: .28em; border-radius: 2px; margin-right: .45em;
  vertical-align: .25em; background: var(--kind, var(--soft)); }
.legend .bm25 i { background: repeating-linear-gradient(90deg, var(--kind) 0 .35em, transparent .35em .6em);
  width: 1.5em; }
.legend .refresh { white-space: nowrap; }
.legend .refresh i { width: 0; height: 0; background: none; border: .42em solid transparent; border-top: 0;
  border-bottom: .75em solid var(--soft); border-radius: 0; vertical-align: -.02em; }
figure.card { display: flex; flex-direction: column; padding: 14px; } figcaption p { margin: 0; line-height: 1.35; }
svg.curves { display: block; width: 100%; max-width: 660px; height: auto; padding-top: 10px; }
figure svg.curves { margin-top: auto; }
svg text { font-size: 13px; fill: var(--soft); font-family: inherit; }
svg .axis { font-size: 12.5px; }
.grid { stroke: var(--line); } .frame { stroke: var(--soft); }
.mark { stroke: var(--soft); stroke-width: .8; opacity: .35; } .flag { fill: var(--soft); }
.band0 { fill: var(--band0); } .band1 { fill: var(--band1); } .band2 { fill: var(--band2); }
.curve { fill: none; stroke: var(--kind); stroke-width: 2.4; stroke-linejoin: round; stroke-linecap: round; }
.dashed { stroke-dasharray: 6 5; stroke-width: 1.8; } .dot { fill: var(--kind); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: 8px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; }
thead th { color: var(--soft); font-weight: 500; font-size: .9rem; }
tbody th { font-weight: 600; }
td.number, th.number { text-align: right; white-space: nowrap; } td:last-child, th:last-child { padding-right: 0; }
.question { font-size: 1.08rem; font-weight: 650; line-height: 1.3; margin: 0 0 .3em; }
.verdict { margin: 0 0 .5em; } .right, .wrong { font-weight: 700; } .right { color: var(--good); }
.wrong { color: var(--bad); }
.passage { border-top: 1px solid var(--line); padding: 8px 0 6px; }
.passage .bar { grid-template-columns: 1fr 6.2em; padding: 0 0 4px; font-size: .88rem; }
.passage .bar .track { height: 9px; }
.passage .label, .reading .bar .label { position: absolute; clip-path: inset(50%); width: 1px; height: 1px;
  overflow: hidden; }
.passage p { margin: 0; font-size: .93rem; line-height: 1.42; }
.gold { font-size: .8rem; color: var(--good); border: 1px solid currentColor; border-radius: 99px; padding: 0 .55em;
  white-space: nowrap; }
mark { background: var(--mark); color: var(--mark-ink); border-radius: 3px; padding: 0 .15em; }
.sentence { font-size: 1.15rem; line-height: 1.45; }
.blank { border-bottom: 2px solid var(--realm); padding: 0 1.6em; }
.reading { display: grid; grid-template-columns: 12em 1fr; gap: 4px 20px; padding: 14px 0;
  border-top: 1px solid var(--line); }
.reading .expression { font-family: Georgia, "Times New Roman", serif; font-style: italic; font-size: 1.05rem; }
.reading .bar { grid-template-columns: 1fr 8em; padding: 2px 0; }
.reading .bar .value { font-size: 1.1rem; text-align: left; }
.reading p { margin: .2em 0 0; }
.settings { columns: 2; column-gap: 40px; margin: 8px 0 0; font-size: .92rem; }
.settings div { display: flex; justify-content: space-between; gap: 12px; padding: 3px 0; break-inside: avoid;
  border-bottom: 1px solid var(--line); }
.settings dt { color: var(--soft); overflow-wrap: normal; } .settings dd { margin: 0; text-align: right; }
code { font: .92em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
@media (max-width: 860px) {
  main { padding: 20px 14px 40px; } .card { padding: 14px; }
  .pair, .quarters { grid-template-columns: 1fr; gap: 14px; }
  .bar { grid-template-columns: 1fr 4em; gap: 1px 10px; padding: 5px 0; } .bar .label { grid-column: 1 / -1; }
  .passage .bar { grid-template-columns: 1fr 6.2em; } .reading .bar { grid-template-columns: 1fr 6.2em; }
  .told thead { display: none; } .told tr { display: grid; grid-template-columns: 1fr auto auto; padding: 8px 0;
    border-bottom: 1px solid var(--line); }
  .told th, .told td { border: 0; padding: 0 0 0 14px; } .told tbody th { padding-left: 0; }
  .told td:nth-child(2) { grid-row: 2; grid-column: 1 / -1; padding: 2px 0 0; }
  .reading { grid-template-columns: 1fr; } .settings { columns: 1; }
  table { font-size: .9rem; } th, td { padding-right: 9px; } header .quarters { gap: 18px; }
  svg text { font-size: 17px; } svg .axis { font-size: 15.5px; }
  .quarters svg .axis { font-size: 12.5px; } .quarters svg text { font-size: 13px; }
}
@media print { .card { break-inside: avoid; } body { background: none; } }
"""
