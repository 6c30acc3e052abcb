"""Linearization of a pretrained model: the LightningModule, its stages and the teacher's stored outputs."""
