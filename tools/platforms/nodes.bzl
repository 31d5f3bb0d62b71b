"""The nodes of remote execution: what is to be edited here for those of an installation (README.md)."""

# The container image that a node runs actions in, made by the Dockerfile here and pinned by its digest:
# "docker://HOST/NAME@sha256:DIGEST". Empty: actions name no image, and run with what the node has.
_IMAGES = {
    "aarch64": "",
    "x86_64": "",
}

# What an action asks for, a property each; a server chooses by them. Names and values are those of the
# platform lexicon of the Remote Execution API.
_PROPERTIES = {
    "aarch64": {
        "ISA": "arm-a64",
        "OSFamily": "linux",
    },
    "x86_64": {
        "ISA": "x86-64",
        "OSFamily": "linux",
    },
}

# What an action asks for beside it where it needs a GPU. The lexicon has no word for it.
GPU_PROPERTIES = {"gpu": "h200"}

def node_properties(machine):
    """The execution properties of a node with processors of the kind `machine`."""
    image = _IMAGES[machine]
    if not image:
        return _PROPERTIES[machine]
    if "@sha256:" not in image:
        fail("the image of %s nodes must be pinned, NAME@sha256:DIGEST, but is %s" % (machine, image))
    return dict(_PROPERTIES[machine], **{"container-image": image})
