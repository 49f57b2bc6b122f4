# The images of a Kubernetes cluster, each for amd64 and arm64. deploy/kubernetes/README.md has the commands, and
# docs/kubernetes.md those for a registry. The processor that this machine does not have is emulated, which
# takes long. Variables of the environment set the build arguments of the same names.

variable "REGISTRY" { default = "" }
variable "PYTHON_IMAGE" { default = "python:3.11-slim" }
variable "PIP_INDEX_URL" { default = "" }
variable "PIP_EXTRA_INDEX_URL" { default = "" }
variable "PIP_FIND_LINKS" { default = "" }
variable "PIP_TRUSTED_HOST" { default = "" }

target "default" {
  name       = image
  matrix     = { image = ["scheduler", "edge-server", "control-unit", "device-agent", "client"] }
  dockerfile = "deploy/docker/Dockerfile"
  target     = image
  tags       = ["${REGISTRY}collapipe/${image}:0.1.0"]
  platforms  = ["linux/amd64", "linux/arm64"]
  output     = ["type=oci,dest=build/images/${image}.tar"]
  args = {
    PYTHON_IMAGE        = PYTHON_IMAGE
    PIP_INDEX_URL       = PIP_INDEX_URL
    PIP_EXTRA_INDEX_URL = PIP_EXTRA_INDEX_URL
    PIP_FIND_LINKS      = PIP_FIND_LINKS
    PIP_TRUSTED_HOST    = PIP_TRUSTED_HOST
  }
}
