// Controls of a picture in a notebook's page: sliders and lists over numbered positions.
"use strict";

class Control {
  constructor({ name, list, labels, start }, moved) {
    Object.assign(this, { name, list, labels, start });
    this.label = document.createElement("label");
    this.input = document.createElement(list ? "select" : "input");
    this.said = document.createElement("output");
    this.label.append(name, this.input, this.said);
    if (list) {
      this.input.append(...labels.map((text, position) => new Option(text, position)));
    } else {
      Object.assign(this.input, { type: "range", min: 0, max: labels.length - 1 });
    }
    this.position = start;
    this.input.addEventListener("input", () => {
      this.position = this.position;
      moved(this);
    });
  }

  get position() {
    return Number(this.input.value);
  }

  set position(to) {
    this.input.value = to;
    this.said.textContent = this.list ? "" : this.labels[to];
  }
}

// Puts elements in place of the note that only a notebook moves the picture.
function replaceNote(script, elements) {
  const box = document.createElement("div");
  box.className = "controls";
  box.append(...elements);
  script.previousElementSibling.replaceWith(box);
}
