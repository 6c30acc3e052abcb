import time
import tracemalloc

import pytest

from data_pipeline.documents import Problems
from data_pipeline.sources.markdown_docs.markdown_docs import MarkdownDocs
from data_pipeline.sources.markdown_docs.markdown_pages import plain_markdown

PROSE = (
    "This sentence is long enough to be kept as a document by itself, for it has over one hundred characters in all."
)


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "docs"
    (root / ".git").mkdir(parents=True)
    return root


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(root, strict=False, **settings):
    problems = Problems(strict)
    documents = list(MarkdownDocs(str(root), **settings).documents(problems, 1))
    return {d.id.partition(":docs/")[2]: d for d in documents}, problems


def test_a_page_has_its_title_date_and_licence_and_no_author(repository):
    write(repository, "LICENSE", "Attribution 4.0 International\n\nCreative Commons Corporation")
    front = "---\ntitle: Sizes of\n  machines\nauthor: someone\nms.author: someone\nms.date: 3/4/2024\n---\n"
    write(repository, "articles/sizes.md", front + "\r\n" + PROSE)
    write(repository, "titled.md", f"---\ntitle: Other\ndate: 2023-05-06T01:02:03Z\n---\n# Own title\n\n{PROSE}")
    found, problems = read(repository)
    assert not problems.counts
    page = found["articles/sizes.md"]
    assert page.text == f"# Sizes of machines\n\n{PROSE}"
    assert page.metadata == {
        "source": "markdown_docs",
        "category": "general_system",
        "origin": str(repository / "articles/sizes.md"),
        "date": "2024-03-04",
        "licence": "CC-BY-4.0",
    }
    assert found["titled.md"].text.startswith("# Own title\n")
    assert found["titled.md"].metadata["date"] == "2023-05-06"


def test_only_pages_are_read(repository):
    for name in (
        "README.md",
        "a.rst",
        "includes/part.md",
        "node_modules/x.md",
        ".hidden/x.md",
        "LICENSE.md",
        "short.md",
    ):
        write(repository, name, "Short." if name == "short.md" else PROSE)
    assert set(read(repository)[0]) == {"README.md"}


def test_includes_come_from_the_repository_and_from_nowhere_else(repository, tmp_path):
    write(tmp_path, "secret.md", "SECRET")
    write(repository, "includes/a.md", "---\nauthor: x\n---\nfrom a, [!INCLUDE [b](b.md)]\n")
    write(repository, "includes/b.md", "from b")
    write(repository, "docs/snippet.md", "from a\nsnippet")
    write(
        repository, "data/variables/product.yml", "name: &n Big\nlong:\n  form: 'Big {% data variables.product.name %}'"
    )
    write(repository, "data/reusables/some/thing.md", "from reusables of {% data variables.product.long.form %}")
    (repository / "includes" / "link.md").symlink_to(tmp_path / "secret.md")
    page = [
        PROSE,
        "1 [!INCLUDE [x](../includes/a.md)] end",
        "2 [!INCLUDE[x](~/includes/b.md)]",
        '    --8<-- "snippet.md"',
        "4 {% data reusables.some.thing %}",
        "5 [!INCLUDE [x](../../secret.md)][!INCLUDE [x](../includes/link.md)][!INCLUDE [x](/etc/passwd)]",
        "6 [!INCLUDE [x](gone.md)]{% data variables.product.gone %}",
        '7 {{< include "includes/b.md" >}}',
    ]
    write(repository, "articles/page.md", "\n".join(page))
    found, problems = read(repository)
    assert not problems.counts
    assert found["articles/page.md"].text.split("\n")[1:] == [
        "1 from a, from b end",
        "2 from b",
        "    from a",
        "    snippet",
        "4 from reusables of Big Big",
        "5",
        "6",
        "7 from b",
    ]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"page.md": "[!INCLUDE [x](includes/a.md)]", "includes/a.md": "[!INCLUDE [x](../page.md)]"},
            "includes in a circle",
        ),
        ({"page.md": "[!INCLUDE [x](page.md)]"}, "includes in a circle (page.md"),
        (
            {"page.md": "[!INCLUDE [x](includes/0.md)]"}
            | {f"includes/{n}.md": f"[!INCLUDE [x]({n + 1}.md)]" * 9 for n in range(9)}
            | {"includes/9.md": "end"},
            "includes without end (over 1000 of them)",
        ),
        (
            {"page.md": "[!INCLUDE [x](includes/0.md)]"}
            | {f"includes/{n}.md": f"[!INCLUDE [x]({n + 1}.md)]" for n in range(30)},
            "includes without end (over 10 deep)",
        ),
        (
            {"page.md": "[!INCLUDE [x](includes/a.md)]" * 99, "includes/a.md": "x" * 90_000},
            "includes without end (over 1000000 bytes)",
        ),
        ({"page.md": b"caf\xe9 " * 99}, "not UTF-8 (byte 3)"),
        ({"page.md": "nul \0" * 99}, "NUL byte (byte 4)"),
        ({"page.md": "word " * 300_000}, "file too large (over 1000000 bytes)"),
        ({"page.md": "---\ntitle: [a\n---\nx"}, "broken front matter"),
        ({"page.md": f"---\n{'- ' * 5000}\n---\nx"}, "broken front matter (RecursionError)"),
        ({"page.md": f"---\ntitle: {'[' * 9000}\n---\nx"}, "broken front matter (over 2000 brackets)"),
        ({"page.md": f"---\ntitle: {'a' * 70_000}\n---\nx"}, "broken front matter (over 65536"),
    ],
)
def test_what_cannot_be_read_is_named_and_stepped_over(repository, files, words):
    for name, text in files.items():
        write(repository, name, text)
    write(repository, "z.md", PROSE)
    found, problems = read(repository, max_file_bytes=1_000_000)
    assert set(found) == {"z.md"}
    assert problems.counts.total() == 1
    assert f"{repository / 'page.md'}: {words}" in problems.lines[0]
    with pytest.raises(ValueError, match="strict=false"):
        read(repository, strict=True, max_file_bytes=1_000_000)


def test_aliases_in_front_matter_do_not_grow(repository):
    bomb = "\n".join(
        [f"a0: &a0 {{x: {'x' * 50}}}"] + [f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 9)]
    )
    lists = "\n".join(["b0: &b0 [x, x]"] + [f"b{n}: &b{n} [{','.join([f'*b{n - 1}'] * 9)}]" for n in range(1, 12)])
    write(repository, "page.md", f"---\n{bomb}\n{lists}\ntitle: Kept\n---\n{PROSE}")
    tracemalloc.start()
    found = read(repository)[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["page.md"].text.startswith("# Kept\n")
    assert peak < 5e6


def test_links_out_of_a_repository_are_not_followed(repository, tmp_path):
    write(tmp_path, "outside/secret.md", PROSE)
    write(repository, "page.md", PROSE)
    (repository / "linked.md").symlink_to(tmp_path / "outside/secret.md")
    (repository / "folder").symlink_to(tmp_path / "outside")
    (repository / "circle").symlink_to(repository)
    assert set(read(repository)[0]) == {"page.md"}


CHANGES = {
    "a call-out": ("> [!NOTE]\n> Mind this.", "> **Note:**\n> Mind this."),
    "a next step": ('> [!div class="next"]\n> [Next](x.md)', "> Next"),
    "docfx tabs": (
        "# [Azure CLI](#tab/azure-cli)\n\nRun it.\n\n# [Portal](#tab/portal)\n\nClick.\n\n---\n\nEnd.\n\n---",
        "**Azure CLI**\n\nRun it.\n\n**Portal**\n\nClick.\n\nEnd.\n\n---",
    ),
    "mkdocs tabs": (
        '=== "Linux"\n\n    Run\n\n    ```sh\n    ls\n      -l\n    ```\n\n'
        '=== "Other"\n\n    !!! note\n\n        Deep.\n\nOut',
        "**Linux**\n\nRun\n\n```sh\nls\n  -l\n```\n\n**Other**\n\n**Note**\n\nDeep.\n\nOut",
    ),
    "zones": ('::: zone pivot="csharp"\n\nText.\n\n::: zone-end\n:::row:::', "Text."),
    "a Docusaurus call-out": (":::note Mind\nthis\n:::", "**Mind**\nthis"),
    "a docfx image": (':::image type="content" source="m/x.png" alt-text="A picture.":::', "A picture."),
    "Hugo tabs": (
        '{{< tabs name="x" >}}\n{{% tab name="Linux" %}}\nrun\n{{% /tab %}}\n{{< /tabs >}}',
        "**Linux**\nrun",
    ),
    "a Hugo heading": ('## {{% heading "whatsnext" %}}', "## What's next"),
    "Hugo terms": (
        'a {{< glossary_tooltip text="Pod" term_id="pod" >}} of {{< glossary_tooltip term_id="api-server" >}}',
        "a Pod of api server",
    ),
    "a Hugo note": ("{{< note >}}\nText\n{{< /note >}}", "**Note:**\nText"),
    "Liquid": (
        "{% ifversion ghes %}Text{% endif %} {{ site.name }} `{{ kept }}` ${{ kept.too }}",
        "Text  `{{ kept }}` ${{ kept.too }}",
    ),
    "Liquid code": ("{% highlight sh %}\nls {{ x }}\n{% endhighlight %}", "```sh\nls {{ x }}\n```"),
    "code": (
        "```yaml\n{% raw %}a: ${{ b }}{% endraw %}\n<!-- kept -->\n# [t](#tab/t)\n[a](b.md)\n```",
        "```yaml\na: ${{ b }}\n<!-- kept -->\n# [t](#tab/t)\n[a](b.md)\n```",
    ),
    "comments": ("a <!-- one --> b <!-- two\nthree\n--> c `<!-- code -->`", "a  b\n c `<!-- code -->`"),
    "links": (
        "[text](../x.md#y) [web](https://a.org/(x)) ![alt](p.png) [![badge](b.svg)](https://c.org) [`co[d]e`](x.md)",
        "text [web](https://a.org/(x)) alt [badge](https://c.org) `co[d]e`",
    ),
    "references": (
        "[r][ref] [Ref] ![ref] [other] a[0]\n\n```\n[ref]\n```\n\n[ref]: x.md",
        "r Ref ref [other] a[0]\n\n```\n[ref]\n```",
    ),
    "code spans": ("`a[0][1]` `Map[K](x)` [ref][1] [`f[0](x)`](y.md)\n\n[1]: x", "`a[0][1]` `Map[K](x)` ref `f[0](x)`"),
    "elements": ('<a name="x"></a>T <kbd>K</kbd><br/>U <img src="x" alt="pic"> <b> <T>', "T K U pic <b> <T>"),
    "attributes": ("## Title {#custom-id}\n{: .class}", "## Title"),
    "a fence in a fence": (
        "````md\n```\n<!-- x -->\n```\n````\n<!-- y -->z",
        "````md\n```\n<!-- x -->\n```\n````\nz",
    ),
    "a fence in a list": (
        "- a\n\n  ```sh\n  <!-- x -->\n  ```\n- b <!-- y -->",
        "- a\n\n  ```sh\n  <!-- x -->\n  ```\n- b",
    ),
    "tildes": ("~~~\n``` <!-- x -->\n~~~", "~~~\n``` <!-- x -->\n~~~"),
    "empty lines": ("a\n\n\n\n\nb\n\n```\nx\n\n\n\ny\n```", "a\n\nb\n\n```\nx\n\n\n\ny\n```"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_site_generators_add_becomes_text_or_goes(name):
    text, plain = CHANGES[name]
    assert plain_markdown(text) == plain


def test_mdx_loses_imports_and_elements(repository):
    element = '<TabItem value="a" label="Linux">'
    text = f"import Tabs from '@theme/Tabs';\n\n<Tabs>\n{element}\n\nRun.\n\n</TabItem>\n</Tabs>\n"
    write(repository, "page.mdx", text + PROSE)
    assert read(repository)[0]["page.mdx"].text == f"**Linux**\n\nRun.\n\n{PROSE}"


@pytest.mark.parametrize(
    "unit",
    [
        "[",
        "[a](",
        "`",
        "`` ` ",
        "<!--",
        "{{< ",
        "{% ",
        "<a ",
        "![[",
        "> ",
        "[a][",
        "<img alt='",
        "(((",
        "[x](<",
        '=== "a"\n    ',
    ],
)
def test_hostile_text_takes_linear_time(unit):
    start = time.process_time()
    plain_markdown(unit * (200_000 // len(unit)), components=True)
    assert time.process_time() - start < 4


def test_parts_are_groups_of_files_and_together_all_of_them(repository, tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.sources.markdown_docs.markdown_docs.PART_BYTES", 1000)
    for number in range(40):
        write(repository, f"{number:02d}.md", PROSE + f" {number}")
    source = MarkdownDocs(str(repository))
    source.prepare(tmp_path, Problems())
    parts = source.parts(tmp_path)
    assert len(parts) == 5
    alone = [d.id for part in reversed(parts) for d in source.read(part, tmp_path, Problems())]
    assert sorted(alone) == [f"markdown_docs:docs/{n:02d}.md" for n in range(40)]


def test_wrong_folders_are_named(repository, tmp_path):
    with pytest.raises(ValueError, match=r"^paths=.*nowhere is not a folder"):
        MarkdownDocs(str(tmp_path / "nowhere")).identity()
    (repository / "inner").mkdir()
    with pytest.raises(ValueError, match=r"inner lies in .*docs: give one"):
        MarkdownDocs([str(repository), str(repository / "inner")]).identity()
    (tmp_path / "more" / "docs").mkdir(parents=True)
    with pytest.raises(ValueError, match="has the name of"):
        MarkdownDocs([str(repository), str(tmp_path / "more" / "docs")]).identity()
    with pytest.raises(ValueError, match=r"^paths=.*no Markdown"):
        read(repository)


def test_identity_changes_with_a_page_an_include_and_the_settings(repository):
    include = write(repository, "includes/a.md", "x")
    write(repository, "a.md", PROSE)
    before = MarkdownDocs(str(repository)).identity()
    assert MarkdownDocs(str(repository)).identity() == before
    assert MarkdownDocs(str(repository), category="design").identity() != before
    include.write_text("changed")
    assert MarkdownDocs(str(repository)).identity() != before
