"""Cleaning steps: each takes datatrove `Document`s and yields fewer, shorter or masked ones.

| module | step | what it removes |
|---|---|---|
| `language` | `Language` | documents whose prose is in another language |
| `sites` | `Sites` | documents by host and path of their url |
| `quality` | `Quality` | documents that fail Gopher, C4 and FineWeb rules, applied to prose and code separately |
| `duplicates` | `exact_documents`, `near_duplicates` | all but one of equal and of nearly equal documents |
| `spans` | `exact_spans` | spans of text that occur in an earlier document |
| `masks` | `Masks` | mail and IP addresses, keys, tokens and passwords, by placeholders |
| `decontamination` | `Decontamination` | documents that contain parts of evaluation sets |
| `record` | `Recorded`, `merge_records` | nothing: records what a step removed, and why |

The filters and `Masks` are datatrove `PipelineStep`s for one pipeline. `exact_documents`, `near_duplicates` and
`exact_spans` need several pipelines in sequence, and return them as `PipelineStage`s, in order. `prose`, `words` and
`windows` are shared by the steps.
"""
