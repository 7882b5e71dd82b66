// The only file that knows Python: it hands the core's functions over and releases the GIL around them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "copier.h"
#include "gpu.h"
#include "kernel.h"
#include "link.h"
#include "nccl.h"
#include "probe.h"

namespace py = pybind11;
using pymesh3d::Argument;
using pymesh3d::Copier;
using pymesh3d::Ends;
using pymesh3d::Gpu;
using pymesh3d::Kernel;
using pymesh3d::Link;
using pymesh3d::Matrix;
using pymesh3d::Nccl;
using pymesh3d::NcclOptions;
using pymesh3d::Piece;
using pymesh3d::Probe;
using pymesh3d::Steps;
using pymesh3d::Stream;
using pymesh3d::UniqueId;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

py::bytes as_bytes(const UniqueId& id) { return {id.bytes, sizeof id.bytes}; }

UniqueId as_id(const std::string& bytes) {
  UniqueId id{};
  if (bytes.size() != sizeof id.bytes) throw py::value_error("a unique id has 128 bytes, got " + std::to_string(bytes.size()));
  std::copy(bytes.begin(), bytes.end(), id.bytes);
  return id;
}

std::unique_ptr<Link> make_link(std::shared_ptr<const Gpu> gpu, std::shared_ptr<const Nccl> nccl, const std::string& id,
                           std::array<int, 2> ranks, int end, std::uintptr_t scratch, int min_ctas, int max_ctas, double timeout) {
  if (end != 0 && end != 1) throw py::value_error("a link has ends 0 and 1, got " + std::to_string(end));
  const UniqueId unique = as_id(id);
  const py::gil_scoped_release released;
  return std::make_unique<Link>(std::move(gpu), std::move(nccl), unique, Ends{ranks, end}, scratch,
                                NcclOptions{min_ctas, max_ctas, timeout});
}

std::pair<std::uint64_t, std::uint64_t> transfer(Link& link, std::uintptr_t sent, std::size_t sent_bytes, std::uintptr_t received,
                                                 std::size_t received_bytes, Stream stream) {
  const py::gil_scoped_release released;
  return link.transfer({sent, sent_bytes}, {received, received_bytes}, stream);
}

// Each a number, or a tuple of what a Matrix holds, in order.
std::vector<Argument> as_arguments(const py::sequence& given) {
  std::vector<Argument> arguments;
  for (const py::handle one : given) {
    if (!py::isinstance<py::tuple>(one)) {
      arguments.emplace_back(one.cast<std::int64_t>());
      continue;
    }
    const auto [address, rows, cols, stride, block_rows, block_cols] =
        one.cast<std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint32_t, std::uint32_t>>();
    arguments.emplace_back(Matrix{address, rows, cols, stride, block_rows, block_cols});
  }
  return arguments;
}

std::unique_ptr<Kernel> make_kernel(std::shared_ptr<const Gpu> gpu, std::uintptr_t function, unsigned programs, unsigned threads,
                                    unsigned shared_bytes, const py::sequence& arguments) {
  return std::make_unique<Kernel>(std::move(gpu), function, programs, threads, shared_bytes, as_arguments(arguments));
}

void tell(const Gpu& gpu, pymesh3d::Stream stream, const std::vector<std::uintptr_t>& flags, std::uint32_t value) {
  const py::gil_scoped_release released;
  for (const std::uintptr_t flag : flags) gpu.tell(stream, flag, value);
}

void wait_until(const Gpu& gpu, pymesh3d::Stream stream, const std::vector<std::uintptr_t>& flags, std::uint32_t value) {
  const py::gil_scoped_release released;
  for (const std::uintptr_t flag : flags) gpu.wait_until(stream, flag, value);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The compiled part of pymesh3d. It knows integers, pointers and streams; no tensors, no mesh.";
  module.attr("version") = PYMESH3D_VERSION;
  module.attr("sources") = PYMESH3D_SOURCES;
  module.attr("digest") = PYMESH3D_DIGEST;

  py::class_<Probe>(module, "Probe", "What was found of a shared library.")
      .def_readonly("path", &Probe::path)
      .def_property_readonly("version", [](const Probe& probe) { return py::tuple(py::cast(probe.version)); })
      .def_readonly("was_loaded", &Probe::was_loaded)
      .def_readonly("error", &Probe::error);

  py::register_exception<pymesh3d::LibraryError>(module, "LibraryError", PyExc_RuntimeError);
  py::register_exception<pymesh3d::GpuError>(module, "GpuError", PyExc_RuntimeError);
  py::register_exception<pymesh3d::NcclError>(module, "NcclError", PyExc_RuntimeError);

  py::class_<Gpu, std::shared_ptr<Gpu>>(module, "Gpu", "The CUDA driver.")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def("tell", &tell, py::arg("stream"), py::arg("flags"), py::arg("value"))
      .def("wait_until", &wait_until, py::arg("stream"), py::arg("flags"), py::arg("value"));

  py::class_<Nccl, std::shared_ptr<Nccl>>(module, "Nccl", "The NCCL library.")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def_property_readonly("version", &Nccl::version)
      .def("unique_id", [](const Nccl& nccl) { return as_bytes(nccl.unique_id()); });

  py::class_<Link>(module, "Link", "One end of what joins two ranks: transfers both ways, in order.")
      .def(py::init(&make_link), py::arg("gpu"), py::arg("nccl"), py::arg("id"), py::arg("ranks"), py::arg("end"), py::arg("scratch"),
           py::kw_only(), py::arg("min_ctas") = 0, py::arg("max_ctas") = 0, py::arg("timeout") = 300.0)
      .def("transfer", &transfer, py::arg("sent"), py::arg("sent_bytes"), py::arg("received"), py::arg("received_bytes"), py::arg("stream"))
      .def("join", &Link::join, py::arg("number"), py::arg("stream"), NoGil())
      .def("finished", &Link::finished)
      .def("check", &Link::check, NoGil())
      .def("abort", &Link::abort, py::arg("seconds"), NoGil())
      .def("close", &Link::close, NoGil());

  py::class_<Kernel>(module, "Kernel", "A kernel that triton has compiled, and its arguments.")
      .def(py::init(&make_kernel), py::arg("gpu"), py::arg("function"), py::arg("programs"), py::arg("threads"), py::arg("shared_bytes"),
           py::arg("arguments"))
      .def("start", &Kernel::start, py::arg("stream"), py::arg("addresses"), NoGil());

  py::class_<Steps>(module, "Steps", "What a copier does, one after the other.")
      .def(py::init())
      .def("copy", &Steps::copy, py::arg("to"), py::arg("source"), py::arg("bytes"))
      .def("tell", &Steps::tell, py::arg("flag"))
      .def("wait_until", &Steps::wait_until, py::arg("flag"));

  py::class_<Copier>(module, "Copier", "A stream for copies, by the copy engines.")
      .def(py::init<std::shared_ptr<const Gpu>>(), py::arg("gpu"))
      .def_property_readonly("stream", &Copier::stream)
      .def("start", &Copier::start, py::arg("steps"), py::arg("value"), py::arg("stream"), NoGil())
      .def("join", &Copier::join, py::arg("stream"), NoGil());

  // Opening a library reads files and runs its constructors, which may take long.
  module.def("probe", &pymesh3d::probe, py::arg("name"), py::arg("path") = "", py::call_guard<py::gil_scoped_release>(),
             "Opens the library `name` (\"nccl\" or \"cuda\"), or the file `path` in its place, and asks for its version.");
}
