"""`job=measure benchmark=efficiency`: the time of attention in decoding, one model against another.

| module | what it holds |
|---|---|
| `job` | the job: settings, models, results |
| `models` | the measured models: files of conf/model, or folders with a config.json |
| `bytes_model` | the bytes that each module of a layer's step must move |
| `cells` | lengths to measure, and times over outputs: a cell for each prefix and output |
| `subjects` | copies of a model's attention layer and caches in rotation, as other layers come between in a model |
| `measuring` | times of modules and kernels on a GPU, and a cell that is really decoded |
| `report`, `pictures` | savings by cell and module, the tables, the CSV file, and the paper's figures 2 to 6 |

The definitions are those of Sigma (arXiv 2501.13629, section 3.3). KET, the kernel execution time, is the time of each
kernel of decode attention. CEET, the CUDA event elapsed time, is the time of three modules of a layer over the whole
output: queries (all query projections), the cache (loading and storing keys and values), and attention. Here attention
reads the cache in place, so its time includes the load, and the cache module is the store: one launch that rotates
queries and keys and writes the token's keys and values. All layers of a model are alike, so one layer is measured.
"""
