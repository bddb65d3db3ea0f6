// Texts from files, as they are dropped, pasted or chosen.

/** @typedef {{name: string, text: string}} TextFile */

const MOST = 16 * 2 ** 20; // bytes: no context holds more
/** @type {[RegExp, string][]} */
const REFUSED = [
  [
    /^image\/|\.(png|jpe?g|gif|webp|svg|heic)$/i,
    "is an image, and the models here read text alone. Describe it in words.",
  ],
  [/pdf$/i, "is a PDF, which is not read here. Copy its text into the message."],
  [/^(audio|video)\//i, "is no text, and the models here read text alone."],
  [/officedocument|msword|\.(docx?|xlsx?|pptx?|odt)$/i, "is an office document. Save it as text, and give that."],
];

/** Read a file as text. Throws Error with a sentence. @param {File} file @returns {Promise<TextFile>} */
export async function read(file) {
  for (const [kind, why] of REFUSED) {
    if (kind.test(file.type) || kind.test(file.name)) throw new Error(`${file.name} ${why}`);
  }
  if (file.size > MOST) throw new Error(`${file.name} has ${Math.round(file.size / 2 ** 20)} MiB. Give a part of it.`);
  const binary = new Error(`${file.name} is not text in UTF-8. Convert it, and give that.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw binary;
  }
  if (text.includes("\0")) throw binary;
  return { name: file.name, text: text.replaceAll("\r\n", "\n") };
}
