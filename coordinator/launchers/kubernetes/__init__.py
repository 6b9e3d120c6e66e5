"""A cluster as a JobSet, or as a TrainJob of Kubeflow: its manifest, and how it is submitted."""
