// The editor of a kernel exercise in the page: CodeMirror, the buttons, the verdict, and the pictures of the stepper.
// widget.py is its part in the notebook's kernel. `make editor` builds bundle.js from this file.

import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { cpp } from "@codemirror/lang-cpp";
import { python } from "@codemirror/lang-python";
import { bracketMatching, HighlightStyle, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
import { EditorState, StateEffect, StateField } from "@codemirror/state";
import { Decoration, EditorView, keymap, lineNumbers, MatchDecorator, ViewPlugin } from "@codemirror/view";
import { tags } from "@lezer/highlight";

// ---- the text ---------------------------------------------------------------------------------------

// JupyterLab's own colours, so that the editor follows its theme.
const color = (name, otherwise) => `var(--jp-mirror-editor-${name}-color, ${otherwise})`;
const COLORS = HighlightStyle.define([
    { tag: [tags.keyword, tags.modifier], color: color("keyword", "#008000"), fontWeight: "bold" },
    { tag: [tags.comment], color: color("comment", "#408080"), fontStyle: "italic" },
    { tag: [tags.string, tags.character], color: color("string", "#ba2121") },
    { tag: [tags.number, tags.bool, tags.null], color: color("number", "#008800") },
    { tag: [tags.typeName, tags.standard(tags.typeName)], color: color("builtin", "#008000") },
    { tag: [tags.function(tags.variableName), tags.definition(tags.variableName)], color: color("def", "#0000ff") },
    { tag: [tags.operator, tags.compareOperator], color: color("operator", "#7800c2") },
    { tag: [tags.meta, tags.processingInstruction, tags.annotation], color: color("meta", "#aa22ff") },
]);

// What CUDA adds to C++.
const WORDS = /\b(?:__(?:global|device|shared|constant|restrict|forceinline|launch_bounds)__|(?:thread|block)Idx|(?:block|grid)Dim)\b/g;
const cuda = ViewPlugin.define(
    (view) => {
        const words = new MatchDecorator({ regexp: WORDS, decoration: Decoration.mark({ class: "moeblaze-cuda" }) });
        return { found: words.createDeco(view), update(change) { this.found = words.updateDeco(change, this.found); } };
    },
    { decorations: (plugin) => plugin.found },
);

const LANGUAGES = { "c++": () => [cpp(), cuda], python: () => [python()] };

// The lines at which the lanes of the warp are in a step.
const setLanes = StateEffect.define();
const lanesAtLines = StateField.define({
    create: () => Decoration.none,
    update: (marks, change) =>
        change.effects.reduce((now, effect) => (effect.is(setLanes) ? effect.value : now), marks.map(change.changes)),
    provide: (field) => EditorView.decorations.from(field),
});

function lanesMarks(doc, line, lanes) {
    const counts = new Map(Object.entries(lanes).map(([number, count]) => [Number(number), count]));
    if (line !== null && !counts.has(line)) counts.set(line, 0);
    const marked = [...counts].filter(([number]) => number <= doc.lines).sort(([one], [other]) => one - other);
    return Decoration.set(
        marked.map(([number, count]) => {
            const attributes = { class: number === line ? "moeblaze-now" : "moeblaze-at" };
            if (count) attributes["data-lanes"] = `${count} ${count === 1 ? "lane" : "lanes"}`;
            return Decoration.line({ attributes }).range(doc.line(number).from);
        }),
    );
}

function diagnostics(doc, marks) {
    return marks.map(({ line, severity, message }) => {
        const { from, to, text } = doc.line(Math.min(Math.max(line, 1), doc.lines));
        return { from: from + text.length - text.trimStart().length, to, severity, message };
    });
}

// ---- the page ---------------------------------------------------------------------------------------

function element(name, properties, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
}

function button(label, title, onclick) {
    return element("button", { className: "jupyter-button", textContent: label, title, onclick });
}

async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const area = element("textarea", { value: text }); // a page that does not come over https has no clipboard
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
}

function render({ model, el }) {
    const text = () => view.state.doc.toString();
    const ask = (what) => model.send({ do: what, text: text() });

    const run = button("Run", "Check the kernel (Ctrl-Enter)", () => ask("check"));
    const step = button("Step", "Run the kernel once, and step through what its threads did", () => ask("step"));
    const stop = button("Stop", "End what runs", () => model.send({ do: "stop" }));
    const copied = button("Copy as cell", "Copy the text as a cell that begins with %%check", async () => {
        await copy(`%%check ${model.get("name")}\n${text().trimEnd()}`);
        copied.textContent = "Copied";
        setTimeout(() => (copied.textContent = "Copy as cell"), 2000);
    });
    const again = button("Start again", "Show the exercise's first text; Ctrl-Z brings yours back", () =>
        view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: model.get("unsolved") } }),
    );
    const bar = element("progress", { max: model.get("limit") });
    const elapsed = element("span");
    const running = element("span", { className: "moeblaze-running" }, bar, elapsed, stop);
    const verdict = element("div", { className: "moeblaze-verdict", role: "status" });
    if (model.get("language") !== "c++") {
        step.disabled = true;
        step.title = "The stepper is for CUDA kernels";
    }

    const view = new EditorView({
        state: EditorState.create({
            doc: model.get("text"),
            extensions: [
                lintGutter(),
                lineNumbers(),
                history(),
                bracketMatching(),
                indentOnInput(),
                indentUnit.of("    "),
                syntaxHighlighting(COLORS),
                LANGUAGES[model.get("language")](),
                lanesAtLines,
                EditorView.contentAttributes.of({ "aria-label": `kernel of the exercise ${model.get("name")}` }),
                keymap.of([
                    { key: "Mod-Enter", run: () => (ask("check"), true) },
                    ...defaultKeymap,
                    ...historyKeymap,
                    ...lintKeymap,
                    indentWithTab,
                ]),
                EditorView.updateListener.of((change) => change.docChanged && keepSoon()),
            ],
        }),
    });

    // The kernel keeps the text: a page that is loaded again shows it.
    let waiting;
    function keepSoon() {
        clearTimeout(waiting);
        waiting = setTimeout(() => {
            model.set("text", text());
            model.save_changes();
        }, 500);
    }

    // The stepper.
    const warps = element("select", { ariaLabel: "warp", onchange: () => choose("warp", warps.value) });
    const slider = element("input", { type: "range", min: 1, ariaLabel: "step" });
    slider.onchange = () => choose("step", slider.valueAsNumber);
    const move = (by) => choose("step", Math.min(Math.max(model.get("step") + by, 1), model.get("steps")));
    const back = button("◀ Back", "One step back", () => move(-1));
    const next = button("Next ▶", "One step on", () => move(1));
    const count = element("span");
    const picture = element("img");
    const controls = element("div", { className: "moeblaze-bar" }, warps, back, slider, next, count);
    const stepper = element("div", { className: "moeblaze-stepper" }, controls, picture);

    function choose(name, value) {
        model.set(name, value);
        model.save_changes();
    }

    let since;
    function showElapsed() {
        const seconds = Math.floor((Date.now() - since) / 1000);
        bar.value = seconds;
        elapsed.textContent = `${seconds} s of at most ${bar.max} s`;
    }

    let clock;
    function showDoing() {
        const doing = model.get("doing");
        run.disabled = doing !== "";
        step.disabled = doing !== "" || model.get("language") !== "c++";
        running.hidden = doing === "";
        clearInterval(clock);
        if (doing === "") return;
        since = Date.now();
        showElapsed();
        clock = setInterval(showElapsed, 250);
    }

    function showVerdict() {
        verdict.innerHTML = model.get("verdict"); // made and escaped by widget.py
        verdict.hidden = model.get("verdict") === "";
        verdict.classList.toggle("moeblaze-right", model.get("right"));
    }

    function showMarks() {
        view.dispatch(setDiagnostics(view.state, diagnostics(view.state.doc, model.get("marks"))));
    }

    function showStep() {
        const names = model.get("warps");
        stepper.hidden = names.length === 0;
        if ([...warps.options].map((option) => option.value).join() !== names.join())
            warps.replaceChildren(...names.map((name) => new Option(name)));
        warps.value = model.get("warp");
        slider.max = model.get("steps");
        slider.value = model.get("step");
        count.textContent = `step ${model.get("step")} of ${model.get("steps")}`;
        const marks = lanesMarks(view.state.doc, model.get("line"), model.get("lanes"));
        view.dispatch({ effects: setLanes.of(marks) });
    }

    function showPicture() {
        URL.revokeObjectURL(picture.src);
        picture.src = URL.createObjectURL(new Blob([model.get("picture")], { type: "image/png" }));
        picture.alt = model.get("alt");
    }

    const shown = [
        ["doing", showDoing],
        ["verdict right", showVerdict],
        ["marks", showMarks],
        ["warps warp steps step line lanes", showStep],
        ["picture alt", showPicture],
    ];
    for (const [names, show] of shown) {
        for (const name of names.split(" ")) model.on(`change:${name}`, show);
        show();
    }

    el.classList.add("moeblaze-editor");
    el.dataset.lmSuppressShortcuts = "true"; // JupyterLab leaves the keys to the editor
    const bars = element("div", { className: "moeblaze-bar" }, run, step, copied, again, running);
    el.append(bars, view.dom, verdict, stepper);

    return () => {
        clearInterval(clock);
        clearTimeout(waiting);
        for (const [names, show] of shown) for (const name of names.split(" ")) model.off(`change:${name}`, show);
        view.destroy();
    };
}

export default { render };
