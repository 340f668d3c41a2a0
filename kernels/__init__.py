"""Device kernels. Each op has one public function that validates, one Pallas kernel for Hopper, and one plain-XLA twin.

Nothing here knows models, requests or meshes: arrays go in, arrays come out.
"""
