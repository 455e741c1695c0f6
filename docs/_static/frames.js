// Pictures that controls move, without a kernel: the build of the site has drawn one for each state.
"use strict";

for (const script of document.querySelectorAll("script.frames")) {
  const { folder, controls, frames } = JSON.parse(script.textContent);
  const picture = script.nextElementSibling;
  const message = document.createElement("p");
  message.hidden = true;
  picture.after(message);

  const frame = () => frames[all.map((control) => control.position)];
  const all = controls.map((data) => new Control(data, (moved) => {
    if (!frame()) { // only one control has moved at a time: the others go back
      for (const other of all) if (other !== moved) other.position = other.start;
    }
    const { picture: name, alt, message: said } = frame();
    if (name) Object.assign(picture, { src: folder + name, alt });
    message.textContent = said ?? "";
    picture.hidden = !name;
    message.hidden = !said;
  }));
  const combined = controls.reduce((product, { labels }) => product * labels.length, 1);
  const hint = Object.keys(frames).length < combined ? "One at a time; run the notebook to combine them." : "";
  replaceNote(script, [...all.map((control) => control.label), hint]);
}
