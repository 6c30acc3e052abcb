import contextlib
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.markup.latex.convert import decode, latex_markdown, main_file
from data_pipeline.markup.latex.macros import LatexError


def body(text, preamble="", **files):
    """Return the Markdown of a document with `text` in it; other files of the paper by path (`a__b` for a/b.tex)."""
    main = f"\\documentclass{{article}}\n{preamble}\n\\begin{{document}}\n{text}\n\\end{{document}}\njunk"
    named = {f"{name.replace('__', '/')}.tex": content for name, content in files.items()}
    return latex_markdown({"main.tex": main, **named})


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a\n   b\n\n\nc", "a b\n\nc"),
        (r"\section{One}x\subsection*{Two \emph{b}}y", "## 1 One\n\nx\n\n### Two *b*\n\ny"),
        (r"\chapter{C}\section[short]{S}z", "## 1 C\n\n### 1.1 S\n\nz"),
        (r"\section{A}\appendix\section{B}\subsection{C}", "## 1 A\n\n## A B\n\n### A.1 C"),
        (r"\paragraph{Cost.} Low.", "**Cost.** Low."),
        (r"\textbf{a} {\bf b} \texttt{c\_d} {\em e} \textsc{F} {g}", "**a** **b** `c_d` *e* F g"),
        (r"100\% of \$5, R\&D, \#1 \{x\} a\_b \textbackslash n \ldots", "100% of $5, R&D, #1 {x} a_b \\n ..."),
        ("``it's'' a---b 1--2 x~y", '"it\'s" a—b 1–2 x y'),
        (r"na\"{\i}ve caf\'e \c{c}a \v{S} \~n \o \ss{} \H o", "naïve café ça Š ñ øß ő"),
        (r"see \cite[p.~3]{a, b} and \citep{c}~\nocite{*}", "see [a, b] and [c]"),
        (r"x\footnote{A note.} y", "x (A note.) y"),
        (r"\url{http://a.b/c\_d%20e} \href{http://a.b}{text}", "http://a.b/c_d%20e [text](http://a.b)"),
        (r"$a < b_1$ and \(c\)", "$a < b_1$ and $c$"),
        ("\\[ x\n\n= y \\]", "$$\nx\n= y\n$$"),
        ("$$z$$", "$$\nz\n$$"),
        ("\\begin{equation}\\label{e}\na\n\\end{equation} by \\eqref{e}", "$$\n\\label{e}\na\n$$\n\nby (e)"),
        ("\\begin{align*}\na &= b \\\\\n&= c\n\\end{align*}", "\\begin{align*}\na &= b \\\\\n&= c\n\\end{align*}"),
        ("costs $5 here\n\nand there", "costs $5 here\n\nand there"),
        ("\\begin{quote}a\n\nb\\end{quote}", "> a\n>\n> b"),
        ("\\begin{proof}[Sketch] p \\end{proof}", "**Proof (Sketch).** p"),
        (r"\vspace{2em}\hspace*{1cm}\vskip 5pt plus 1pt a \todo{fix} \noindent b\\[2pt] c", "a b\nc"),
        (r"\unknown[x]{kept} \LaTeX\ [12]", "kept LaTeX [12]"),
        ("\\begin{tikzpicture}\\draw (0,0);\\end{tikzpicture}a\\begin{abstract}b\\end{abstract}", "a"),
        ("a\\iffalse b \\ifx c\\fi d\\else e\\fi f", "a e f"),
    ],
)
def test_text_becomes_markdown(text, markdown):
    assert body(text) == markdown


def test_comments_go_as_tex_reads_them():
    text = "a% gone\n   b 50\\% c\\\\% gone\n% a line\nd%\n\ne \\verb|% stays| % \\begin{verbatim}\nf"
    assert body(text) == "ab 50% c\nd\n\ne `% stays` f"
    assert body("a\\begin{comment}\nb % \\end\n\\end{comment}c") == "ac"


CODE = "if (a % b == 0) {  // {\n\t\\foo & $x$\n\n}"


@pytest.mark.parametrize(
    ("source", "fence"),
    [
        ("\\begin{verbatim}\n%s\n\\end{verbatim}", ""),
        ("\\begin{lstlisting}[language=C++, basicstyle={\\small}]\n%s\n\\end{lstlisting}", "c++"),
        ("\\begin{lstlisting}[language={[ANSI]C}]\n%s\n\\end{lstlisting}", "c"),
        ("\\begin{minted}[linenos]{go}\n%s\n\\end{minted}", "go"),
        ("\\begin{Verbatim}[fontsize=\\small]\n%s\n\\end{Verbatim}", ""),
        ("\\begin{code}\n%s\n\\end{code}", ""),
        ("\\begin{rustcode}\n%s\n\\end{rustcode}", ""),
        ("\\lstinputlisting[language=Python]{src/code.tex}", "python"),
        ("\\inputminted{go}{src/code}", "go"),
    ],
)
def test_code_stays_as_it_is(source, fence):
    preamble = "\\lstnewenvironment{code}{}{}\\newminted{rust}{}\\newcommand{\\foo}{WRONG}"
    listing = f"```{fence}\n{CODE}\n```"
    text = source.replace("%s", CODE)
    assert body(f"before\n{text}\nafter", preamble, src__code=CODE) == f"before\n\n{listing}\n\nafter"


def test_code_in_a_list_is_indented_and_a_caption_kept():
    code = "\\begin{lstlisting}[caption={Run [it]}]\na\n  b\n\\end{lstlisting}"
    assert body(f"\\begin{{itemize}}\\item x {code}\\end{{itemize}}") == "- x\n\n  ```\n  a\n    b\n  ```\n\n  Run [it]"
    assert body(r"\lstinline{a  b} \mintinline{c}|{| \verb+`x`+ \verb*!y!") == "`a  b` `{` `` `x` `` `y`"


def test_lists_nest_and_keep_labels():
    text = r"""\begin{enumerate}[label=(\roman*)] \item a \begin{itemize} \item b
    \item c \end{itemize} \item d \end{enumerate}
    \begin{description}\item[One] first \item[\textbf{Two}] second\end{description}"""
    assert body(text) == "1. a\n\n   - b\n   - c\n2. d\n\n- **One** first\n- **Two** second"


def test_figures_and_tables_keep_captions_numbers_and_cells():
    text = r"""\begin{figure}[t]\centering\includegraphics[width=\textwidth]{a.pdf}
    \caption[short]{The \emph{design}.}\label{fig:d}\end{figure}
    \begin{table*}\caption{Cost}\label{tab:c}\begin{tabular}{|l|p{2cm}|}\toprule
    Name & Cost \\ \cmidrule(lr){1-2} \multicolumn{2}{c}{both} \\ $1 & 2$ & R\&D | {x & y} \\ \bottomrule
    \end{tabular}\end{table*} Figure~\ref{fig:d}, Table~\ref{tab:c}, Section~\ref{sec:later}, \ref{none}.
    \section{Later}\label{sec:later}"""
    assert body(text) == (
        "**Figure 1:** The *design*.\n\n**Table 1:** Cost\n\n"
        "| Name | Cost |\n| --- | --- |\n| both |  |\n| $1 & 2$ | R&D \\| x & y |\n\n"
        "Figure 1, Table 1, Section 1, none.\n\n## 1 Later"
    )


def test_pseudocode_is_a_block_of_code():
    text = r"""\begin{algorithm}\caption{Sum}\begin{algorithmic}[1] \Require $n > 0$ \State $s \gets 0$
    \For{$i \in 1..n$} \If{$i$ is odd} \State $s \gets s + i$ \Comment{odd} \EndIf \EndFor \State \Return \Call{f}{$s$}
    \end{algorithmic}\end{algorithm}"""
    assert body(text).splitlines() == [
        *("**Algorithm 1:** Sum", "", "```", "Require: $n > 0$", r"$s \gets 0$", r"for $i \in 1..n$ do"),
        *("  if $i$ is odd then", r"    $s \gets s + i$", "    // odd", "  end if", "end for", "return f($s$)", "```"),
    ]


def test_the_bibliography_and_thanks_are_cut_and_what_follows_stays():
    text = r"""\section{A} a \section*{Acknowledgments} thanks \subsection{to all} \section*{References} [1] x
    \bibliographystyle{plain}\bibliography{b}\begin{thebibliography}{9}\bibitem{a} A\end{thebibliography}
    \appendix \section{Proofs} p \begin{acks}money\end{acks}"""
    assert body(text) == "## 1 A\n\na\n\n## A Proofs\n\np"
    main = f"\\documentclass{{a}}\\begin{{document}}{text}\\end{{document}}"
    kept = latex_markdown({"main.tex": main}, keep_acknowledgements=True)
    assert "## Acknowledgments\n\nthanks" in kept
    assert kept.endswith("money")


MACROS = {
    r"\newcommand{\sys}{\textsc{Foo}\xspace}|\sys is \sys, \sys\ and \sys{}bar": "Foo is Foo, Foo and Foobar",
    r"\newcommand*\pair[2][x]{(#1; #2)}|\pair{y} \pair[z]{w} \pair{\pair{u}}": "(x; y) (z; w) (x; (x; u))",
    r"\def\v#1#2{#2#1}|\v ab \v{c}{d}": "ba dc",
    r"\newcommand{\R}{\mathbb{R}}\DeclareMathOperator*{\argmax}{arg\,max}|$\R^n \argmax_x$": (
        r"$\mathbb{R}^n \operatorname*{arg\,max}_x$"
    ),
    r"\newcommand{\bfv}[1]{\mathbf#1}|$\bfv x$": r"$\mathbf x$",
    r"\def\be{\begin{equation}}\def\ee{\end{equation}}|\be a \ee": "$$\na\n$$",
    r"\let\old\emph \renewcommand{\emph}[1]{!}\let\x=\y \def\y{late}|\emph{a} \x": "*a* late",
    r"\newenvironment{note}[1]{\begin{quote}#1: }{\end{quote}}|\begin{note}{N} b \end{note}": "> N: b",
    r"\newtheorem{thm}{Theorem}[section]|\begin{thm}\label{t} x \end{thm} by \ref{t}": "**Theorem 1.** x\n\nby 1",
    r"\newif\ifdraft|\ifdraft a\else b\fi \drafttrue \ifdraft c\else d\fi": "b c",
    r"\def\until#1;{[#1]}|\until x; y": "x; y",
    r"\newcommand{\one}{\one x}\newcommand{\two}{\three}\newcommand{\three}{\two y}|1 \one{} \two{} 2": "1 x y 2",
    r"\newcommand{\open}{|x \open y": "x y",
    r"\def\ok{fine}\newcommand{\%}{no}|\ok": "fine",
}


@pytest.mark.parametrize("case", MACROS)
def test_macros_are_expanded(case):
    preamble, _, text = case.partition("|")
    assert body(text, preamble) == MACROS[case]


def test_macros_of_a_package_of_the_papers_own_are_known():
    main = r"\documentclass{a}\usepackage{amsmath,own}\begin{document}\x\end{document}"
    assert latex_markdown({"main.tex": main, "own.sty": r"\newcommand{\x}{here}\def\section{}"}) == "here"


def test_files_are_joined_inside_the_archive_only():
    main = r"""\documentclass{a}\begin{document}\input{sec/one}\include{two}\subfile{three} \import{sec/}{four}
    \input ../../etc/passwd \input{../main} \input{none}\end{document}"""
    files = {
        "paper/main.tex": main,
        "paper/sec/one.tex": "one \\input{deep} \\input{main} % \\input{two}",
        "paper/sec/deep.tex": "deep\\endinput gone",
        "paper/two.tex": "two \\input{two}",
        "paper/three.tex": r"\documentclass[main]{subfiles}\begin{document}three\end{document}",
        "paper/sec/four.tex": "four",
        "etc/passwd": "secret",
    }
    assert latex_markdown(files).split() == ["one", "deep", "two", "three", "four"]


def test_the_main_file_is_found():
    document = "\\documentclass{a}\\begin{document}x\\end{document}"
    assert main_file({"b.tex": "text", "a.sty": document, "c.tex": document}) == "c.tex"
    assert main_file({"a.tex": document, "ms.tex": document, "old/main.tex": document}) == "ms.tex"
    assert main_file({"a.tex": document, "b.tex": document + "longer"}) == "b.tex"
    assert (
        main_file({"long.tex": "\\documentclass{standalone}\\begin{document}" + "y" * 99, "a.tex": document}) == "a.tex"
    )
    assert main_file({"old.tex": "\\documentstyle[12pt]{article}\n\\begin{document}"}) == "old.tex"
    assert main_file({"a.tex": "% \\documentclass{a}\nplain \\bye"}) is None
    assert main_file({"a.tex": document, "z.tex": document, "00README.XXX": "z.tex toplevelfile\n"}) == "z.tex"
    readme = '{"sources": [{"filename": "a.tex", "usage": "ignore"}, {"filename": "z.tex", "usage": "toplevel"}]}'
    assert main_file({"a.tex": document, "z.tex": document, "00README.json": readme}) == "z.tex"
    assert (
        main_file({"a.tex": document, "00README.json": "[" * 100_000, "00README": "gone.tex toplevelfile"}) == "a.tex"
    )


def test_a_paper_without_a_main_file_is_refused():
    with pytest.raises(LatexError, match="no main file"):
        latex_markdown({"a.tex": "x"})


def test_encodings_and_line_ends_come_out_alike():
    assert decode(b"\xef\xbb\xbfcaf\xc3\xa9\r\nb\rc\0\x07") == "café\nb\nc"
    assert decode(b"caf\xe9") == "café"
    assert decode("a\ue0000\ue001b".encode()) == "a0b"  # what stands for text set aside cannot come from outside


def chain(definition, levels=24):
    names = [f"m{chr(ord('a') + level)}" for level in range(levels + 1)]
    return "".join(definition.format(a=a, b=b) for a, b in itertools.pairwise(names))


BOMBS = {
    "doubling": (chain(r"\def\{a}{{\{b}\{b}}}") + r"\def\my{x}", r"\ma"),
    "arguments": (chain(r"\newcommand{{\{a}}}[1]{{\{b}{{#1#1#1}}}}"), r"\ma{xxxxxxxx}"),
    "depth": (chain(r"\def\{a}{{\{b}}}", 25), r"\ma" * 10 + r"\newcommand{\f}[1]{(#1)}" + r"\f{" * 500 + "}" * 500),
    "environments": ("", r"\begin{x}" * 5000),
    "lists": ("", r"\begin{itemize}\item " * 3000 + r"\end{itemize}" * 3000),
    "emphasis": ("", r"\emph{" * 3000 + "}" * 3000),
}


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_are_refused_soon(case):
    preamble, text = BOMBS[case]
    start = time.process_time()
    with pytest.raises(LatexError, match=r"without bound|deep"):
        body(text, preamble)
    assert time.process_time() - start < 5


def test_files_that_take_each_other_in_twice_are_refused():
    files = {f"f{n}": f"\\input{{f{n + 1}}}\\input{{f{n + 1}}}" for n in range(15)}
    with pytest.raises(LatexError, match="join into over"):
        body(r"\input{f0}", **files, f15="x" * 10_000)


def test_a_verbatim_text_is_one_argument():
    assert body(r"\section\verb|x| \ref{\verb|y|}", r"\newcommand{\f}[1]{(#1)}").startswith("## 1 `x`")
    assert body(r"\f\verb|x| y", r"\newcommand{\f}[1]{(#1)}") == "(`x`) y"


UNCLOSED = [
    "{",
    "$",
    r"\(",
    r"\verb|",
    r"\iffalse ",
    r"\newcommand{",
    r"\begin{lstlisting}[",
    r"\lstinputlisting[",
    r"\'",
]


@pytest.mark.parametrize("piece", [*UNCLOSED, r"\section{References}", r"\newtheorem" + " " * 99, r"\foo[", "%\n"])
def test_unclosed_pieces_take_linear_time(piece):
    start = time.process_time()
    with contextlib.suppress(LatexError):
        body(piece * 5000)
    assert time.process_time() - start < 3


PIECES = [
    "\\",
    "{",
    "}",
    "[",
    "]",
    "$",
    "$$",
    "%",
    "&",
    "#1",
    "\n\n",
    " a ",
    "\\begin{itemize}",
    "\\end{itemize}",
    "\\item",
]
PIECES += [
    "\\begin{tabular}{l}",
    "\\end{tabular}",
    "\\\\",
    "\\def\\a",
    "\\newcommand{\\b}[1]",
    "\\a",
    "\\b",
    "\\caption",
    "~",
]
PIECES += [
    "\\verb|",
    "\\begin{verbatim}",
    "\\end{verbatim}",
    "\\section",
    "\\label",
    "\\ref",
    "\\'",
    "\\(",
    "\\)",
    "\\iffalse",
]
PIECES += [
    "\\fi",
    "\\begin{algorithmic}",
    "\\end{algorithmic}",
    "\\If",
    "\\State",
    "\\multicolumn{3}",
    "\\let\\a\\b",
    "\\input{b}",
]
PIECES += [
    "\\newif\\ifz",
    "\\ifz",
    "\\newenvironment{n}",
    "\\begin{n}",
    "\\end{n}",
    "\\href",
    "\\begin{equation}",
    "\\end{equation}",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_no_text_brings_the_conversion_down(pieces):
    try:
        text = body("".join(pieces), b="\\a b")
    except LatexError:
        return
    assert not set("\ue000\ue001\ue002\ue003").intersection(text)
