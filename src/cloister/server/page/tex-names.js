// What the commands of TeX's mathematics stand for. Pure.

/** Returns a table of names to characters: "alpha α beta β" by pairs. */
const pairs = (text) => new Map(text.trim().split(/\s+/).reduce((all, word, i, words) => (i % 2 ? [...all, [words[i - 1], word]] : all), []));

/** Letters: drawn slanted as variables. */
export const LETTERS = pairs(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ
  lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
  Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω ell ℓ hbar ℏ imath ı jmath ȷ Re ℜ Im ℑ aleph ℵ
  top ⊤ bot ⊥ partial ∂ infty ∞ emptyset ∅ varnothing ∅ wp ℘`);

/** Operators and relations; negations among them. */
export const OPERATORS = pairs(`times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ otimes ⊗ ominus ⊖ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨
  cap ∩ cup ∪ setminus ∖ neg ¬ lnot ¬ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ ll ≪ gg ≫ approx ≈ sim ∼ simeq ≃ cong ≅ equiv ≡ propto ∝ doteq ≐
  in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ nsubseteq ⊈ mid ∣ nmid ∤ parallel ∥ perp ⊥ vdash ⊢ models ⊨ forall ∀ exists ∃
  nexists ∄ nabla ∇ to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ impliedby ⟸ Leftrightarrow ⇔
  iff ⟺ mapsto ↦ longrightarrow ⟶ longleftarrow ⟵ hookrightarrow ↪ uparrow ↑ downarrow ↓ Uparrow ⇑ Downarrow ⇓ leadsto ⇝ dots … ldots … cdots ⋯ vdots ⋮ ddots ⋱
  angle ∠ triangle △ square □ therefore ∴ because ∵ prime ′ dagger † degree ° colon : lvert | rvert | vert | lVert ‖ rVert ‖ Vert ‖ |  ‖
  langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lbrace { rbrace } { { } } % % & & # # $ $ _ _ backslash ∖`);

/** Operators that take what stands below and above them in displayed formulas. */
export const LARGE = pairs("sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂");
export const INTEGRALS = pairs("int ∫ iint ∬ iiint ∭ oint ∮");

/** Functions, which are written upright; those of the second list take limits below. */
export const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg arg hom gcd Pr
  lim limsup liminf max min sup inf argmax argmin`.trim().split(/\s+/));
export const LIMITED = new Set("lim limsup liminf max min sup inf argmax argmin det gcd Pr".split(" "));

/** Marks over a letter; the second list stretches over more than one. */
export const ACCENTS = pairs("hat ^ widehat ^ tilde ~ widetilde ~ bar ¯ overline ¯ vec → overrightarrow → dot ˙ ddot ¨ check ˇ breve ˘ acute ´ grave `");
export const STRETCHED = new Set(["widehat", "widetilde", "overline", "overrightarrow"]);

/** Spaces, in em. */
export const SPACES = new Map([[",", 0.167], [":", 0.222], [">", 0.222], [";", 0.278], ["!", -0.167], [" ", 0.25], ["quad", 1], ["qquad", 2], ["enspace", 0.5]]);

/** Alphabets: where their capitals, small letters and digits begin in Unicode, and the letters that stand elsewhere. */
const ALPHABETS = {
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce, {}],
  boldsymbol: [0x1d468, 0x1d482, 0x1d7ce, {}],
  mathcal: [0x1d49c, 0x1d4b6, 0x30, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }],
  mathfrak: [0x1d504, 0x1d51e, 0x30, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2, {}],
  mathtt: [0x1d670, 0x1d68a, 0x1d7f6, {}],
};
ALPHABETS.mathscr = ALPHABETS.mathcal;
ALPHABETS.bm = ALPHABETS.boldsymbol;
ALPHABETS.mathit = null;
ALPHABETS.mathrm = null;
ALPHABETS.operatorname = null;

/** Whether a command writes its argument in another alphabet. */
export const isAlphabet = (name) => Object.hasOwn(ALPHABETS, name);

/** Returns a text in an alphabet; what the alphabet does not have stays as it is. */
export function inAlphabet(text, name) {
  const alphabet = ALPHABETS[name];
  if (!alphabet) return text;
  const [capital, small, digit, others] = alphabet;
  return [...text].map((char) => {
    if (others[char]) return others[char];
    const [first, base] = /[A-Z]/.test(char) ? ["A", capital] : /[a-z]/.test(char) ? ["a", small] : /\d/.test(char) ? ["0", digit] : [];
    return first ? String.fromCodePoint(char.charCodeAt(0) - first.charCodeAt(0) + base) : char;
  }).join("");
}

/** Fences after `\left` and `\right` that are no commands. */
export const FENCES = { ".": "", "(": "(", ")": ")", "[": "[", "]": "]", "|": "|", "/": "/", "<": "⟨", ">": "⟩" };

/** Environments of rows and columns, with their fences. */
export const MATRICES = {
  matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"],
};

/** Environments whose columns are set right and left in turn. */
export const ALIGNED = new Set("aligned align align* split gathered gather gather* equation equation* array".split(" "));

/** Commands of size and place that change nothing here. */
export const IGNORED = new Set(`displaystyle textstyle limits nolimits nonumber notag thinspace
  big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm Bigm`.trim().split(/\s+/));
