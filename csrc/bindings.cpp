// The only file that knows Python: it hands the core's functions over and releases the GIL around them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "probe.h"

namespace py = pybind11;
using pymesh3d::Probe;

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled part of pymesh3d. It knows integers, pointers and streams; no tensors, no mesh.";
  module.attr("version") = PYMESH3D_VERSION;

  py::class_<Probe>(module, "Probe", "What was found of a shared library.")
      .def_readonly("path", &Probe::path)
      .def_property_readonly("version", [](const Probe& probe) { return py::tuple(py::cast(probe.version)); })
      .def_readonly("was_loaded", &Probe::was_loaded)
      .def_readonly("error", &Probe::error);

  // Opening a library reads files and runs its constructors, which may take long.
  module.def("probe", &pymesh3d::probe, py::arg("name"), py::arg("path") = "", py::call_guard<py::gil_scoped_release>(),
             "Opens the library `name` (\"nccl\" or \"cuda\"), or the file `path` in its place, and asks for its version.");
}
