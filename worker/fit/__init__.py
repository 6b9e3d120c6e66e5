"""`model.fit` on a local cluster: hands a model and data over, and brings the state back."""
