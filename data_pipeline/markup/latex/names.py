"""Tables of the LaTeX commands and environments known to the conversion."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SECTIONS = {
    "part": 0,
    "chapter": 1,
    "section": 2,
    "subsection": 3,
    "subsubsection": 4,
    "paragraph": 5,
    "subparagraph": 6,
}
MARKS = {"textbf": "**", "textit": "*", "textsl": "*", "emph": "*", "texttt": "`", "path": "`"}
FONTS = {"bf": "**", "bfseries": "**", "em": "*", "it": "*", "itshape": "*", "sl": "*", "tt": "`", "ttfamily": "`"}
CITATIONS = _names(
    "cite citep citet citealp citealt citeauthor citeyear citeyearpar Citet Citep onlinecite parencite textcite "
    "autocite footcite Textcite Autocite shortcite citeN citenum"
)
# Text around the number or the key that each command refers to.
REFERENCES = {
    **dict.fromkeys(("ref", "pageref", "nameref", "autoref", "cref", "Cref", "vref", "subref", "fref", "Fref"), "{}"),
    "eqref": "({})",
}
MATHEMATICS = _names(
    "math displaymath equation align alignat flalign gather multline eqnarray dmath subequations IEEEeqnarray xalignat"
)
LISTS = _names(
    "itemize enumerate description compactitem compactenum compactdesc inparaenum inparaitem asparaenum asparaitem "
    "packed_item packed_enum trivlist"
)
TABLES = _names("tabular tabularx tabulary longtable supertabular tabu tblr")
QUOTES = _names("quote quotation verse displayquote")
FLOATS = {
    **dict.fromkeys(("figure", "wrapfigure", "SCfigure", "sidewaysfigure", "teaserfigure"), "Figure"),
    **dict.fromkeys(("table", "wraptable", "sidewaystable", "longtable"), "Table"),
    "algorithm": "Algorithm",
    **dict.fromkeys(("listing", "codelisting"), "Listing"),
    **dict.fromkeys(("subfigure", "subtable"), ""),  # numbered with letters
}
THEOREMS = {
    name: name.capitalize()
    for name in ("theorem", "lemma", "proof", "definition", "corollary", "proposition", "remark", "example", "claim")
}
# Number of braced arguments after \begin{...}; they concern layout only.
ENVIRONMENT_ARGUMENTS = {
    **dict.fromkeys(("tabular", "longtable", "supertabular", "tabu", "tblr", "minipage", "subfigure", "subtable"), 1),
    **dict.fromkeys(("multicols", "adjustbox", "spacing", "turn", "rotate"), 1),
    **dict.fromkeys(("tabularx", "tabulary", "wrapfigure", "wraptable", "adjustwidth"), 2),
}
# The abstract is taken from the metadata.
DROPPED_ENVIRONMENTS = _names(
    "thebibliography abstract tikzpicture pgfpicture picture axis pspicture forest CCSXML IEEEkeywords keywords "
    "keyword titlepage biography IEEEbiography IEEEbiographynophoto references"
)
# Commands without output, by the number of arguments to drop with them.
_DROPPED = (
    "maketitle tableofcontents listoffigures listoftables centering noindent clearpage newpage hline toprule midrule "
    "bottomrule printbibliography balance smallskip medskip bigskip raggedright raggedleft protect relax sloppy and "
    "frontmatter mainmatter backmatter IEEEpeerreviewmaketitle null hfill vfill linebreak pagebreak footnotemark "
    "makeatletter makeatother arraystretch",
    "vspace hspace includegraphics bibliographystyle bibliography pagestyle thispagestyle index hypersetup "
    "thanks title author date affiliation email address institute titlerunning authorrunning subtitle orcid ead nocite "
    "todo usepackage RequirePackage documentclass documentstyle graphicspath input include addbibresource color epsfig "
    "rowcolor columncolor cellcolor cline pagenumbering setstretch phantom hphantom "
    "vphantom ccsdesc acmConference acmYear acmISBN acmDOI setcopyright copyrightyear acmJournal acmVolume acmNumber "
    "acmArticle acmMonth acmPrice keywords terms category institution city country state postcode streetaddress "
    "shortauthors shorttitle stepcounter refstepcounter newcounter newlength captionsetup lstset sisetup "
    "usetikzlibrary IEEEauthorblockN IEEEauthorblockA textcolor tikzset pgfplotsset colorbox foreignlanguage hyperlink "
    "pagecolor hypertarget texorpdfstring sout scalebox rotatebox raisebox parbox",
    "setcounter addtocounter setlength addtolength "
    "multicolumn multirow rule resizebox fcolorbox markboth fontsize newcolumntype "
    "lstdefinestyle lstdefinelanguage definecolor titleformat",
)
LENGTHS = _names(
    "vskip hskip kern parindent parskip baselineskip tabcolsep columnsep topmargin textheight textwidth itemsep parsep "
    "topsep oddsidemargin evensidemargin abovecaptionskip belowcaptionskip hsize vsize leftskip rightskip"
)
DROPPED_COMMANDS = {name: count for count, names in enumerate(_DROPPED) for name in names.split()} | {
    "addcontentsline": 3,
}
SYMBOLS = {
    **dict.fromkeys(("ldots", "dots", "textellipsis"), "..."),
    "textbackslash": "\\",
    "textasciitilde": "~",
    "textasciicircum": "^",
    "textunderscore": "_",
    "textless": "<",
    "textgreater": ">",
    "textbar": "|",
    "textendash": "–",
    "textemdash": "—",
    "textquotesingle": "'",
    "textquotedblleft": '"',
    "textquotedblright": '"',
    "textdegree": "°",
    "textmu": "µ",
    "texttrademark": "™",
    "textregistered": "®",
    "textcopyright": "©",
    "copyright": "©",
    "pounds": "£",
    "euro": "€",
    "texteuro": "€",
    "textbullet": "•",
    "textperiodcentered": "·",
    "dag": "†",
    "ddag": "‡",
    "S": "§",
    "P": "¶",
    "ss": "ß",
    "ae": "æ",
    "AE": "Æ",
    "oe": "œ",
    "OE": "Œ",
    "o": "ø",
    "O": "Ø",
    "l": "ł",
    "L": "Ł",
    "aa": "å",
    "AA": "Å",
    "i": "ı",
    "j": "ȷ",
    "TeX": "TeX",
    "LaTeX": "LaTeX",
    "BibTeX": "BibTeX",
    "eg": "e.g.",
    "ie": "i.e.",
    "etal": "et al.",
    "quad": " ",
    "qquad": " ",
    "space": " ",
    "newline": "\ue003",
    "tabularnewline": "\ue003",
    "checkmark": "✓",
    "cmark": "✓",
    "xmark": "✗",
    "lbrack": "[",
    "rbrack": "]",
}
ACCENTS = {
    "'": "\u0301",
    "`": "\u0300",
    "^": "\u0302",
    '"': "\u0308",
    "~": "\u0303",
    "=": "\u0304",
    ".": "\u0307",
    "c": "\u0327",
    "v": "\u030c",
    "u": "\u0306",
    "H": "\u030b",
    "r": "\u030a",
    "k": "\u0328",
    "d": "\u0323",
    "b": "\u0331",
}
# Pseudo-code: the change of depth before a statement, its first word, the word after its condition (None without a
# condition), the change of depth after it.
_STATEMENTS = {
    "State": (0, "", None, 0),
    "Statex": (0, "", None, 0),
    "If": (0, "if", " then", 1),
    "ElsIf": (-1, "else if", " then", 1),
    "Else": (-1, "else", None, 1),
    "EndIf": (-1, "end if", None, 0),
    "For": (0, "for", " do", 1),
    "ForAll": (0, "for all", " do", 1),
    "EndFor": (-1, "end for", None, 0),
    "While": (0, "while", " do", 1),
    "EndWhile": (-1, "end while", None, 0),
    "Loop": (0, "loop", None, 1),
    "EndLoop": (-1, "end loop", None, 0),
    "Repeat": (0, "repeat", None, 1),
    "Until": (-1, "until", "", 0),
    "Function": (0, "function", "", 1),
    "EndFunction": (-1, "end function", None, 0),
    "Procedure": (0, "procedure", "", 1),
    "EndProcedure": (-1, "end procedure", None, 0),
    "Require": (0, "Require:", None, 0),
    "Ensure": (0, "Ensure:", None, 0),
    "Return": (0, "return", None, 0),
    "Print": (0, "print", None, 0),
    "Comment": (0, "//", "", 0),
}
ALGORITHM = _STATEMENTS | {name.upper(): statement for name, statement in _STATEMENTS.items()}
